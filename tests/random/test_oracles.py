"""The two oracles agree with one another, so that neither is trusted alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.random import oracle, threefry
from tests.random.strategies import FEW, KEYS, SEEDS, SHAPES


def test_the_known_answer_of_the_paper() -> None:
    ones = np.array([0xFFFFFFFF], dtype=np.uint32)
    left, right = threefry.block(np.array([0xFFFFFFFF] * 2, dtype=np.uint32), ones, ones)
    assert (int(left[0]), int(right[0])) == (0x1CB996FC, 0xBB002BE7)


@given(SEEDS)
def test_seeds(seed: int) -> None:
    assert oracle.key_words(seed).tolist() == threefry.seeded(seed).tolist()


@given(KEYS, st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_keys_of_keys(key: torch.Tensor, num: int, data: int) -> None:
    assert oracle.keys_of(key, num).tolist() == threefry.split(key.numpy(), num).tolist()
    assert oracle.folded(key, data).tolist() == threefry.fold_in(key.numpy(), data).tolist()


@pytest.mark.parametrize("dtype", oracle.BITS, ids=str)
@FEW
@given(KEYS, SHAPES)
def test_bits(dtype: torch.dtype, key: torch.Tensor, shape: tuple[int, ...]) -> None:
    ours = oracle.to_torch(threefry.bits(key.numpy(), shape, dtype.itemsize * 8))
    oracle.assert_bits(ours, oracle.drawn("bits", key, shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@FEW
@given(KEYS, SHAPES)
def test_uniform(dtype: torch.dtype, key: torch.Tensor, shape: tuple[int, ...]) -> None:
    ours = oracle.to_torch(threefry.uniform(key.numpy(), shape, dtype.itemsize * 8))
    oracle.assert_bits(ours, oracle.drawn("uniform", key, shape, dtype=dtype))
