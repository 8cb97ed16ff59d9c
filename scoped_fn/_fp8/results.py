"""What a call in FP8 takes from the state, and gives back to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from scoped_fn._fp8.plan import AMAX, SINK, Column
from scoped_fn._random.graph import KEY
from scoped_fn.state import CompilerState, Fp8State, FrozenDict, active_scope
from scoped_fn.state.fp8_state import needed_fp8, stage_amax, with_sinks


def with_columns(
    state: CompilerState,
    owner: int,
    columns: Sequence[Column],
    request: Any = None,
    device: torch.device | None = None,
) -> CompilerState:
    """Returns the state whose scales of an owner are as the innermost scope has them, with every one of the columns.

    Args:
        state: A state whose innermost scope is on.
        owner: A token.
        columns: What is needed.
        request: What scales are updated by, where a custom recipe says so and not the scope.
        device: Where new scales go.
    """
    scope, held = active_scope(state), state.fp8.get(owner)
    if scope is None or not columns:
        return state
    new = needed_fp8(held, columns, scope.recipe.delayed or request, device)
    return state if new is held else replace(state, fp8=state.fp8.set(owner, new))


def with_results(
    state: CompilerState,
    owner: int,
    columns: Sequence[Column],
    names: Sequence[str],
    results: Sequence[torch.Tensor],
    *,
    records: bool = True,
) -> CompilerState:
    """Returns the state with the key, buffers, amaxes and sinks that came back under these names.

    Args:
        state: The state of the call.
        owner: A token.
        columns: The columns that amaxes and sinks are of.
        names: What each result is.
        results: Tensors.
        records: Whether amaxes and sinks count.
    """
    new = dict(zip(names, results, strict=False))
    if KEY in new:
        state = replace(state, key=new.pop(KEY).view(torch.uint32))
    amax, sinks = new.pop(AMAX, None), new.pop(SINK, None)
    if new:
        buffers = FrozenDict({**state.buffers[owner], **new})
        state = replace(state, buffers=state.buffers.set(owner, buffers))
    if not records or (amax is None and sinks is None):
        return state
    held: Fp8State = state.fp8[owner]
    held = held if amax is None else stage_amax(held, amax, columns)
    held = held if sinks is None else with_sinks(held, sinks, columns)
    return replace(state, fp8=state.fp8.set(owner, held))


Staged = dict[int, tuple[torch.Tensor, torch.Tensor]]


def staged_since(before: CompilerState, after: CompilerState) -> Staged:
    """Returns the staged amaxes (n,) and the sinks of the owners whose scales are other objects now."""
    changed = {owner: held for owner, held in after.fp8.items() if held is not before.fp8.get(owner)}
    return {owner: (held.amax_history[0], held.grad_sink) for owner, held in changed.items()}


def without_staged(before: CompilerState, after: CompilerState) -> CompilerState:
    """Returns the state after, with nothing staged since the one before."""
    fp8 = after.fp8
    for owner, held in after.fp8.items():
        old = before.fp8.get(owner)
        if held is not old:
            fp8 = fp8.set(owner, needed_fp8(old, held.columns, held.recipe, held.scale.device))
    return after if fp8 is after.fp8 else replace(after, fp8=fp8)


def with_staged(state: CompilerState, staged: Staged) -> CompilerState:
    """Returns the state with amaxes (indices, n) and sinks (indices, sinks) of a mapped call.

    The first index's sinks stand for all: their gradient is the maximum over the indices.
    """
    fp8 = state.fp8
    for owner, (amaxes, sinks) in staged.items():
        fp8 = fp8.set(owner, replace(stage_amax(fp8[owner], amaxes.amax(0)), grad_sink=sinks[0]))
    return replace(state, fp8=fp8) if staged else state
