"""Sinks: the inputs whose gradients are the amaxes of FP8 gradients, and how these come into the state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from scoped_fn._fp8.scales import updated
from scoped_fn._torch.dual import in_transform
from scoped_fn._torch.levels import in_vmap, innermost_level
from scoped_fn._torch.tracing import any_transform_active
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
    before: CompilerState,
    after: CompilerState,
    amaxes: Mapping[int, torch.Tensor],
    ran: Collection[int],
    accumulate: bool,
) -> CompilerState:
    """Returns the state after a step: the amaxes of gradients staged, and scales updated unless they accumulate.

    Args:
        before: The state that went in.
        after: The state that came out.
        amaxes: The gradients with respect to the sinks, by owner.
        ran: The owners that recorded something.
        accumulate: Whether the step goes on.
    """
    fp8 = after.fp8
    for owner, held in after.fp8.items():
        if owner not in ran:
            fp8 = fp8.set(owner, before.fp8.get(owner, held))
            continue
        held = replace(held, grad_sink=torch.zeros_like(held.grad_sink))
        if owner in amaxes:
            held = of_owner.stage_gradients(held, amaxes[owner])
        fp8 = fp8.set(owner, held if accumulate or _is_inside(held) else updated(held))
    return replace(after, fp8=fp8) if after.fp8 else after


def recorded(before: CompilerState, after: CompilerState) -> frozenset[int]:
    """Returns the owners whose FP8 scales a call gave back as other objects."""
    return frozenset(owner for owner, held in after.fp8.items() if held is not before.fp8.get(owner))


def lacks_sinks(state: CompilerState, after: CompilerState) -> bool:
    """Returns whether a call needed columns of gradients that the state did not have, so that their amaxes are lost."""
    return any(
        held.grad_sink.numel() > (state.fp8[owner].grad_sink.numel() if owner in state.fp8 else 0)
        for owner, held in after.fp8.items()
    )


def _is_inside(held: of_owner.Fp8State) -> bool:
    """Whether a step is part of another transform, so that it does not end here.

    Amaxes of the indices of a vmap have to be merged first, unless each has scales of its own; and a gradient inside a
    loss is no step.
    """
    if torch.compiler.is_dynamo_compiling():
        return any_transform_active()
    if not in_transform():
        return False
    return not (in_vmap() and is_at(held.scale, innermost_level()))


def watch_gradients(state: CompilerState) -> tuple[CompilerState, Sinks]:
    """Returns the state with sinks that plain autograd follows, and the sinks: for `loss.backward()`.

    After the backward `stage_gradients` takes the amaxes of the gradients from the sinks. One backward for each watch:
    autograd adds up what several of them give.

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
        held = replace(fp8[owner], grad_sink=torch.zeros_like(fp8[owner].grad_sink, requires_grad=False))
        fp8 = fp8.set(owner, held if sink.grad is None else of_owner.stage_gradients(held, sink.grad))
    return replace(state, fp8=fp8) if sinks else state
