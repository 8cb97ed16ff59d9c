"""Strategies for tensors of every shared dtype and layout, and for trees of containers."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import strategies as st

from scoped_fn.interop.dtypes import SHARED, as_numpy


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KnownToJax:
    weight: Any
    bias: Any
    name: str = dataclasses.field(default="layer", metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class KnownToTorch:
    weight: Any
    bias: Any


torch_pytree.register_pytree_node(
    KnownToTorch,
    lambda node: ([node.weight, node.bias], None),
    lambda children, _: KnownToTorch(*children),
    serialized_type_name="tests.interop.KnownToTorch",
)


def bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and every bit of a tensor or an array."""
    if isinstance(leaf, torch.Tensor):
        leaf = as_numpy(leaf.detach().resolve_conj().resolve_neg().contiguous().clone())
    host = np.asarray(leaf)
    return str(host.dtype), host.shape, host.tobytes()


def _filled(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    if dtype == "bool":
        return torch.from_numpy(np.random.default_rng(seed).integers(0, 2, shape).astype(bool))
    size = getattr(torch, dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * size, dtype=np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)


VIEWS = {
    "whole": lambda t: t,
    "transposed": lambda t: t.mT if t.dim() > 1 else t,
    "reversed": lambda t: t.movedim(0, -1) if t.dim() else t,
    "every second": lambda t: t[..., ::2] if t.dim() else t,
    "without the first": lambda t: t[1:] if t.dim() else t,
    "expanded": lambda t: t[None].expand(3, *t.shape),
    "conjugated": lambda t: t.conj() if t.is_complex() else t,
    "negative": lambda t: t.conj().imag if t.is_complex() else t,
    "requires a gradient": lambda t: t.requires_grad_() if t.dtype in (torch.float32, torch.complex64) else t,
}

TENSORS = st.builds(
    lambda dtype, shape, seed, view: VIEWS[view](_filled(dtype, tuple(shape), seed)),
    st.sampled_from(SHARED),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 1000),
    st.sampled_from(sorted(VIEWS)),
)
NAMES = st.text("abz", max_size=2)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Trees of every container that one of the libraries knows, empty ones and `None` too."""
    return st.recursive(
        leaves | st.none(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(NAMES, inner, max_size=3),
            st.dictionaries(NAMES, inner, max_size=3).map(collections.OrderedDict),
            st.builds(Pair, inner, inner),
            st.builds(KnownToJax, inner, inner),
            st.builds(KnownToTorch, inner, inner),
        ),
        max_leaves=8,
    )


def same(left: Any, right: Any) -> bool:
    """Whether two trees have equal containers, in type and order of keys, and equal leaves, bit for bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (torch.Tensor, jax.Array, np.ndarray)):
        return bits(left) == bits(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    return bool(left == right)
