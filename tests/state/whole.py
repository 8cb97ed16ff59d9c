"""A state with every kind of content."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import scoped_fn as sf
from scoped_fn.state import set_buffers
from scoped_fn.state.fp8_state import init_fp8
from tests.generators.operations import AUTOTUNE, LIMIT

CUDAGRAPHS = "torch._inductor.config.triton.cudagraphs"
BUDGET = "torch._functorch.config.activation_memory_budget"


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree, as optree sees them."""
    return list(sf.state.tree_leaves(tree))


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
