"""What a call in FP8 gives back to the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from scoped_fn._fp8_plan import AMAX, SINK
from scoped_fn.state import CompilerState, Fp8State, FrozenDict, active_scope
from scoped_fn.state.fp8_state import extend_fp8, follow_recipe, init_fp8, stage_amax


def current_fp8(state: CompilerState, owner: int, request: Any = None) -> Fp8State | None:
    """Returns the scales of an owner, as the recipe of the scope on top has them.

    Args:
        state: Any state.
        owner: A token.
        request: What scales are updated by, where a custom recipe says so.
    """
    held, scope = state.fp8.get(owner), active_scope(state)
    if held is None or scope is None:
        return held
    recipe = scope.recipe.delayed or request
    return held if recipe is None else follow_recipe(held, recipe)


def with_results(
    state: CompilerState, owner: int, names: Sequence[str], results: Sequence[torch.Tensor], request: Any
) -> CompilerState:
    """Returns the state with the buffers, amaxes and sinks that came back under these names."""
    new = dict(zip(names, results, strict=False))
    amax, sink = new.pop(AMAX, None), new.pop(SINK, None)
    if new:
        buffers = FrozenDict({**state.buffers[owner], **new})
        state = replace(state, buffers=state.buffers.set(owner, buffers))
    if amax is None and sink is None:
        return state
    held = current_fp8(state, owner, request)
    assert held is not None
    held = held if amax is None else stage_amax(held, amax)
    held = held if sink is None else replace(held, grad_sink=sink)
    return replace(state, fp8=state.fp8.set(owner, held))


def staged_since(before: CompilerState, after: CompilerState) -> dict[int, torch.Tensor]:
    """Returns the staged amaxes (n,) of the owners whose scales are other objects now."""
    return {owner: held.amax_history[0] for owner, held in after.fp8.items() if held is not before.fp8.get(owner)}


def unstaged(before: CompilerState, after: CompilerState) -> CompilerState:
    """Returns the state after, with nothing staged since the one before."""
    fp8 = after.fp8
    for owner, held in after.fp8.items():
        old = before.fp8.get(owner)
        if held is not old:
            old = init_fp8(held.columns, held.recipe, held.scale.device) if old is None else old
            fp8 = fp8.set(owner, extend_fp8(follow_recipe(old, held.recipe), held.columns))
    return after if fp8 is after.fp8 else replace(after, fp8=fp8)


def restaged(state: CompilerState, amaxes: dict[int, torch.Tensor]) -> CompilerState:
    """Returns the state with amaxes (n,) staged, by owner."""
    fp8 = state.fp8
    for owner, amax in amaxes.items():
        fp8 = fp8.set(owner, stage_amax(fp8[owner], amax))
    return replace(state, fp8=fp8) if amaxes else state
