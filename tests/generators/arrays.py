"""The one way in which tests compare trees through chex: each tensor as a NumPy array of its bits.

chex knows NumPy. Handed torch tensors it compares shapes and closeness, fails on bfloat16 and FP8, and of a class that
JAX does not know it looks at nothing. So a tree is turned into a flat dict first: path and dtype -> integers as wide as
the dtype, in the tensor's shape. FP8 numbers are their bytes; not a number equals itself, and zeros have a sign.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import chex  # type: ignore[import-untyped]
import numpy as np
import torch
from torch.utils import _pytree as torch_pytree

import scoped_fn as sf

Array = np.ndarray[Any, Any]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STATIC = ("owners", "next_token", "autocast", "overrides", "constants")


def bits(leaf: torch.Tensor) -> Array:
    """The bits of a tensor of any dtype, as an array of integers of its shape; a copy."""
    plain = leaf.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.view(WORDS[real.element_size()]).numpy()


def arrays_of(tree: Any) -> dict[str, Array]:
    """The bits of each tensor of a tree, by its path and dtype; other leaves by their path and `repr`."""
    found = {}
    for path, leaf in torch_pytree.tree_flatten_with_path(tree)[0]:
        name = torch_pytree.keystr(path)
        if isinstance(leaf, torch.Tensor):
            found[f"{name}: {leaf.dtype}"] = bits(leaf)
        else:
            found[f"{name} is {leaf!r}"] = np.zeros(0)
    return found


def static_of(state: sf.CompilerState) -> dict[str, Any]:
    """A copy of what a state holds besides tensors."""
    return {name: copy.deepcopy(getattr(state, name)) for name in STATIC}


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Two trees have the same structure, but for the order of keys, and the same dtypes, shapes and bits."""
    assert sf.state.tree_structure(actual) == sf.state.tree_structure(expected)
    chex.assert_trees_all_equal(arrays_of(actual), arrays_of(expected))


@contextlib.contextmanager
def kept(*states: Any) -> Iterator[None]:
    """The trees are after the block, bit for bit, what they were before it, also where the block raises."""
    before = [(arrays_of(state), static_of(state)) for state in states]
    try:
        yield
    finally:
        for state, (arrays, static) in zip(states, before, strict=True):
            chex.assert_trees_all_equal(arrays_of(state), arrays)
            assert static_of(state) == static
