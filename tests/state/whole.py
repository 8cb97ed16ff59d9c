"""A state with every kind of content, and what a state holds as NumPy arrays and plain data."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import chex  # type: ignore[import-untyped]
import numpy as np
import torch
from torch.utils import _pytree as torch_pytree

import scoped_fn as sf
from scoped_fn.state import set_buffers
from scoped_fn.state.fp8_state import init_fp8

AUTOTUNE = "torch._inductor.config.max_autotune"
CUDAGRAPHS = "torch._inductor.config.triton.cudagraphs"
BUDGET = "torch._functorch.config.activation_memory_budget"
LIMIT = "torch._dynamo.config.recompile_limit"
STATIC = ("owners", "next_token", "autocast", "overrides", "constants")


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree, as optree sees them."""
    return list(sf.state.tree_leaves(tree))


def bits(leaf: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor, of any dtype, as an array of their own."""
    return leaf.detach().clone().contiguous().reshape(-1).view(torch.uint8).numpy()


def arrays_of(tree: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The bytes of each tensor of a tree, by its path."""
    return {torch_pytree.keystr(path): bits(leaf) for path, leaf in torch_pytree.tree_flatten_with_path(tree)[0]}


def static_of(state: sf.CompilerState) -> dict[str, Any]:
    """A copy of what a state holds besides tensors."""
    return {name: copy.deepcopy(getattr(state, name)) for name in STATIC}


@contextlib.contextmanager
def kept(*states: sf.CompilerState) -> Iterator[None]:
    """The states are after the block, bit for bit, what they were before it, also where the block raises."""
    before = [(arrays_of(state), static_of(state)) for state in states]
    try:
        yield
    finally:
        for state, (arrays, static) in zip(states, before, strict=True):
            chex.assert_trees_all_equal(arrays_of(state), arrays)
            assert static_of(state) == static


def owners(*names: str) -> tuple[Any, ...]:
    """A state, and the tokens of new owners in it."""
    state, tokens = sf.init_state(), []
    for name in names:
        state, token = sf.acquire(state, name)
        tokens.append(token)
    return state, *tokens


def whole_state() -> sf.CompilerState:
    """Two owners, of which the first has something of everything."""
    state, first, second = owners("encoder", "decoder")
    state = set_buffers(state, first, {"mean": torch.arange(3.0), "count": torch.tensor(2)})
    fp8 = init_fp8([("0", "input"), ("0", "grad_output")], sf.DelayedScaling(amax_history_len=4))
    state = replace(state, fp8=state.fp8.set(first, fp8))
    state = sf.autocast(state, sf.DelayedScaling())
    state = sf.set_override(state, first, AUTOTUNE, True)
    state = sf.set_override(sf.set_override(state, first, LIMIT, 3), second, LIMIT, 4)
    state, _ = sf.open_frame(state, first)
    state, _ = sf.open_frame(state, second)
    state = sf.push_inputs(state, first, (torch.ones(2, 3), 5), {"mask": torch.tensor([True, False])})
    state = sf.push_inputs(state, first, ({"ids": torch.tensor([7, 9])},), keep_integers=True)
    state = sf.set_constant(state, "ub.fprop.is_fp8", True)
    return sf.set_constant(state, "cuda.capability", (10, 0))
