"""Hypothesis strategies: keys, seeds and shapes."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st

FEW = settings(max_examples=12)  # of functions that come in several dtypes

WORD = st.one_of(st.sampled_from([0, 1, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1))
KEYS = st.tuples(WORD, WORD).map(lambda words: torch.tensor(words, dtype=torch.uint32))
SEEDS = st.one_of(st.sampled_from([0, 7, 2**32 - 1, 2**32, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
# Of a list, since JAX compiles for each shape.
SHAPES = st.sampled_from([(), (0,), (1,), (7,), (129,), (3, 4), (2, 0, 3), (2, 3, 5), (2**16 + 3,), (300, 301)])
