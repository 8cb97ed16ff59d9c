"""Hypothesis strategies for tensors of every kind and for trees of them."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import torch
from hypothesis import strategies as st

Pair = namedtuple("Pair", ["left", "right"])

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.complex64,
)  # fmt: skip
SHAPES = st.sampled_from([(), (0,), (1,), (3,), (2, 3), (0, 2), (2, 1, 2)])
NAMES = st.sampled_from(["a", "b", "weight", "z", "0"])


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor whose bytes are random: not a number, infinities, signed zeros and subnormal numbers come up."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    drawn = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return drawn.view(dtype).reshape(shape)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its memory in another order."""
    return tensor.mT if tensor.dim() > 1 else tensor


TENSORS = st.builds(tensor_of, st.sampled_from(DTYPES), SHAPES, st.integers(0, 99))
ANY_LAYOUT = st.one_of(TENSORS, TENSORS.map(transposed))


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Every container that all three registries of trees know."""
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(NAMES, children, max_size=3),
        st.dictionaries(NAMES, children, max_size=3).map(OrderedDict),
        st.builds(Pair, children, children),
    )


TREES = st.recursive(ANY_LAYOUT, containers, max_leaves=6)
# JAX and optree see None as an empty tree, torch as a leaf.
TREES_WITH_NONE = st.recursive(st.one_of(ANY_LAYOUT, st.none()), containers, max_leaves=6)
