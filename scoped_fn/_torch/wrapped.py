"""Tensors that levels of `torch.func` wrap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import (  # type: ignore[attr-defined]
    _unwrap_for_grad,
    _wrap_for_grad,
    get_interpreter_stack,
    get_unwrapped,
    is_dead_tensor_wrapper,
    is_functorch_wrapped_tensor,
    maybe_get_level,
    peek_interpreter_stack,
    unwrap_if_dead,
)
from torch._subclasses.fake_tensor import is_fake as is_any_fake

from scoped_fn._torch.dual import forward_mode_active, tangent_of
from scoped_fn._torch.levels import JVP, VMAP, Level, levels
from scoped_fn._torch.tensors import PLAIN_TYPES

is_wrapped = is_functorch_wrapped_tensor
is_dead = is_dead_tensor_wrapper


def wrap(tensor: torch.Tensor, level: Level | None) -> torch.Tensor:
    """Returns the tensor wrapped by a grad or jvp level."""
    return tensor if level is None else _wrap_for_grad(tensor, level.number)


def unwrap(tensor: torch.Tensor, level: Level | None) -> torch.Tensor:
    """Returns what a grad or jvp level wraps; the tensor itself if the level does not wrap it."""
    return tensor if level is None else _unwrap_for_grad(tensor, level.number)


def alive(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without wrappers of transforms that have ended."""
    while is_dead_tensor_wrapper(tensor):
        tensor = unwrap_if_dead(tensor)
    return tensor


def is_at(tensor: torch.Tensor, level: Level | None) -> bool:
    """Returns whether a level wraps the tensor; any tensor is at level None, plain torch."""
    return level is None or maybe_get_level(tensor) == level.number


def highest_level(tensors: Sequence[torch.Tensor], *, every_vmap: bool = False) -> Level | None:
    """Returns the highest level that wraps one of the tensors, or is a vmap level; None if there is none."""
    number, top = max(map(maybe_get_level, tensors), default=-1), peek_interpreter_stack()
    if top is not None and top.level() == number:
        return Level(top)
    for raw in reversed(get_interpreter_stack() or ()):
        if raw.level() == number or (every_vmap and raw.key() == VMAP):
            return Level(raw)
    return None


def level_numbers(tensor: torch.Tensor) -> set[int]:
    """Returns the numbers of all levels that wrap a tensor, at any depth."""
    numbers: set[int] = set()
    while is_functorch_wrapped_tensor(tensor):
        numbers.add(maybe_get_level(tensor))
        tensor = get_unwrapped(tensor)
    return numbers


def kinds_of_levels(tensors: Sequence[torch.Tensor]) -> set[Any]:
    """Returns the kinds of all levels that wrap the tensors, at any depth; dual numbers count as `JVP`."""
    numbers: set[int] = set()
    plain = list(tensors)
    if max(map(maybe_get_level, tensors), default=-1) > 0:
        for i, tensor in enumerate(tensors):
            while is_functorch_wrapped_tensor(tensor):
                numbers.add(maybe_get_level(tensor))
                tensor = get_unwrapped(tensor)
            plain[i] = tensor
    kinds = {level.kind for level in levels() if level.number in numbers} if numbers else set()
    dual = forward_mode_active() and any(tangent_of(tensor) is not None for tensor in plain)
    return kinds | {JVP} if dual else kinds


def is_transformed(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether a transform acts on one of the tensors, or one carries a tangent."""
    if any(map(is_functorch_wrapped_tensor, tensors)):
        return True
    return forward_mode_active() and any(tangent_of(t) is not None for t in tensors)


def tracked_and_fake(tensors: Sequence[torch.Tensor]) -> tuple[tuple[bool, ...], bool]:
    """Returns of which tensors a derivative of any level may be taken, and whether one has no data."""
    kinds = {raw.level(): raw.key() for raw in get_interpreter_stack() or ()}
    dual = forward_mode_active()
    tracked, fake = [], False
    for tensor in tensors:
        wanted, differentiable = False, tensor.is_floating_point() or tensor.is_complex()
        while is_functorch_wrapped_tensor(tensor):
            if not wanted:
                wanted = tensor.requires_grad or kinds.get(maybe_get_level(tensor)) == JVP
            tensor = get_unwrapped(tensor)
        if type(tensor) not in PLAIN_TYPES:
            fake = fake or is_any_fake(tensor)
        wanted = wanted or tensor.requires_grad or (dual and tangent_of(tensor) is not None)
        tracked.append(wanted and differentiable)
    return tuple(tracked), fake
