"""Sinks: the inputs whose gradients are the amaxes of FP8 gradients, and how these come into the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from scoped_fn._scales import updated
from scoped_fn._torch.levels import in_vmap, innermost_level
from scoped_fn._torch.wrapped import is_at
from scoped_fn.state import CompilerState
from scoped_fn.state import fp8_state as of_owner

Sinks = dict[int, torch.Tensor]


def with_sinks(state: CompilerState, sinks: Mapping[int, torch.Tensor]) -> CompilerState:
    """Returns the state with other sinks, by owner."""
    fp8 = state.fp8
    for owner, sink in sinks.items():
        fp8 = fp8.set(owner, replace(fp8[owner], grad_sink=sink))
    return state if not sinks else replace(state, fp8=fp8)


def open_sinks(state: CompilerState, prepare: Callable[[torch.Tensor], Any]) -> tuple[CompilerState, Sinks]:
    """Returns the state with its sinks prepared for differentiation, and the sinks by owner."""
    sinks = {owner: prepare(held.grad_sink) for owner, held in state.fp8.items() if held.grad_sink.numel()}
    return with_sinks(state, sinks), sinks


def close_sinks(
    before: CompilerState, after: CompilerState, amaxes: Mapping[int, torch.Tensor], accumulate: bool
) -> CompilerState:
    """Returns the state after a step: the amaxes of gradients staged, and scales updated unless they accumulate.

    Args:
        before: The state that went in.
        after: The state that came out.
        amaxes: The gradients with respect to the sinks, by owner.
        accumulate: Whether the step goes on.
    """
    fp8 = after.fp8
    for owner, held in after.fp8.items():
        if owner in before.fp8 and held is before.fp8[owner]:
            continue  # it did not run
        if owner in amaxes:
            held = of_owner.stage_gradients(replace(held, grad_sink=before.fp8[owner].grad_sink), amaxes[owner])
        fp8 = fp8.set(owner, held if accumulate or _shared_by_indices(held) else updated(held))
    return replace(after, fp8=fp8) if fp8 is not after.fp8 else after


def _shared_by_indices(held: of_owner.Fp8State) -> bool:
    """Whether the indices of a vmap share these scales, so that their amaxes have to be merged before an update."""
    if torch.compiler.is_dynamo_compiling() or not in_vmap():
        return False
    return not is_at(held.scale, innermost_level())


def watch_gradients(state: CompilerState) -> tuple[CompilerState, Sinks]:
    """Returns the state with sinks that plain autograd follows, and the sinks: for `loss.backward()`.

    After the backward `stage_gradients` takes the amaxes of the gradients from the sinks.

    Example:
        >>> import scoped_fn as sf
        >>> state, sinks = sf.watch_gradients(sf.init_state())
        >>> sf.stage_gradients(state, sinks) is state
        True
    """
    return open_sinks(state, lambda sink: torch.zeros_like(sink).requires_grad_())


def stage_gradients(state: CompilerState, sinks: Sinks) -> CompilerState:
    """Returns the state with the amaxes of the gradients staged, apart from autograd's graph.

    Args:
        state: The state that the calls since `watch_gradients` gave.
        sinks: What `watch_gradients` gave, after `backward()`.
    """
    fp8 = state.fp8
    for owner, sink in sinks.items():
        if owner not in fp8:
            continue
        held = replace(fp8[owner], grad_sink=torch.zeros_like(sink, requires_grad=False))
        fp8 = fp8.set(owner, held if sink.grad is None else of_owner.stage_gradients(held, sink.grad))
    return replace(state, fp8=fp8) if sinks else state
