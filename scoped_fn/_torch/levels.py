"""The stack of levels of `torch.func`.

Each transform that is being carried out is one level of a stack, with a number from 1 upwards. A tensor that a
transform acts on is wrapped by its level; level 0 is plain torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._C import (
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
    _is_fwd_grad_enabled,
    _set_fwd_grad_enabled,
    _set_grad_enabled,
)
from torch._C._autograd import (  # type: ignore[attr-defined]
    _saved_tensors_hooks_disable,
    _saved_tensors_hooks_enable,
    _saved_tensors_hooks_get_disabled_error_message,
    _saved_tensors_hooks_is_enabled,
)
from torch._C._functorch import (
    CGradInterpreterPtr,
    CJvpInterpreterPtr,
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,
    _unwrap_batched,
    get_dynamic_layer_stack_depth,
    get_interpreter_stack,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    pop_dynamic_layer_stack_and_undo_to_depth,
    push_dynamic_layer_stack,
)
from torch._functorch.vmap import _chunked_vmap, _process_batched_inputs
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

GRAD, JVP, VMAP = TransformType.Grad, TransformType.Jvp, TransformType.Vmap
transforms_active = peek_interpreter_stack
NOTHING: AbstractContextManager[Any] = nullcontext()


class Level:
    """One transform that is being carried out.

    Attributes:
        number: Its place in the stack, from 1.
        kind: `GRAD`, `JVP`, `VMAP` or another.
    """

    __slots__ = ("kind", "number", "raw")

    def __init__(self, raw: Any) -> None:
        self.number: int = raw.level()
        self.kind: Any = raw.key()
        self.raw = raw

    def batch(self) -> tuple[int, str]:
        """Returns the batch size of a vmap level, and "error", "same" or "different"."""
        pointer = CVmapInterpreterPtr(self.raw)
        return pointer.batchSize(), pointer.randomness().name.lower()

    def unwrap_batch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Returns what a vmap level wraps, and which dimension is the batch; None if the level does not wrap it."""
        return _unwrap_batched(tensor, self.number) if is_functorch_wrapped_tensor(tensor) else (tensor, None)

    def add_batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, whose first dimension is the batch, wrapped by a vmap level."""
        return _add_batch_dim(tensor, 0, self.number)


class Lowered:
    """A context in which work goes on below a level, the highest one, under the grad modes that hold there.

    Args:
        level: The level.
        within: Inside a node's forward, where torch has turned differentiation off, which is for its level only.
    """

    __slots__ = ("level", "modes", "saved", "within")

    def __init__(self, level: Level, *, within: bool = False) -> None:
        self.level, self.within = level, within

    def __enter__(self) -> None:
        modes = self.modes = torch.is_grad_enabled(), _is_fwd_grad_enabled()
        grad, forward = (True, True) if self.within else modes
        if self.level.kind == GRAD:
            grad = grad and CGradInterpreterPtr(self.level.raw).prevGradMode()
        elif self.level.kind == JVP:
            forward = forward and CJvpInterpreterPtr(self.level.raw).prevFwdGradMode()
        if (grad, forward) != modes:
            _set_grad_enabled(grad)
            _set_fwd_grad_enabled(forward)
        self.saved = pop_dynamic_layer_stack()

    def __exit__(self, *error: object) -> None:
        push_dynamic_layer_stack(self.saved)
        grad, forward = self.modes
        _set_grad_enabled(grad)
        _set_fwd_grad_enabled(forward)


def levels() -> list[Level]:
    """Returns all levels, from the lowest."""
    return [Level(raw) for raw in get_interpreter_stack() or ()]


def mapped_size(args: tuple[Any, ...], dims: tuple[Any, ...]) -> int:
    """Returns how many indices `torch.vmap` has with these arguments and `in_dims`."""
    size: int = _process_batched_inputs(dims, args, lambda *_: None)[0]
    return size


def in_chunks() -> bool:
    """Returns whether `torch.vmap` runs with a `chunk_size` somewhere below the caller."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _chunked_vmap.__code__:
        frame = frame.f_back
    return frame is not None


def innermost_level() -> Level | None:
    """Returns the highest level of all; None if no transform is active."""
    raw = peek_interpreter_stack()
    return None if raw is None else Level(raw)


def in_vmap() -> bool:
    """Returns whether a vmap level is active."""
    return any(level.kind == VMAP for level in levels())


def at_level(level: Level | None) -> AbstractContextManager[Any]:
    """Lets work go on at a level, with the ones above it out of the way; None is plain torch."""
    number, top = 0 if level is None else level.number, peek_interpreter_stack()
    if top is None or top.level() <= number:
        return NOTHING
    above = [Level(raw) for raw in get_interpreter_stack() or () if raw.level() > number]
    stack = ExitStack()
    for each in reversed(above):
        stack.enter_context(Lowered(each))
    return stack


def below(level: Level | None, *, within: bool = False) -> AbstractContextManager[Any]:
    """Lets work go on below a level, the highest one; there is nothing below None. `within` as in `Lowered`."""
    return NOTHING if level is None else Lowered(level, within=within)


@contextmanager
def on_values() -> Iterator[None]:
    """Lets code read and make plain tensors, whatever transforms, traces and fake modes are open around it."""
    with apart(), _disable_current_modes():
        yield


@contextmanager
def apart() -> Iterator[None]:
    """Lets a capture or a derivation go on in plain torch, and leaves torch as it was, whatever fails inside.

    A graph that holds transforms leaves their levels behind when it fails; and with a forward-mode level open some fake
    operations of torch fail and leave dispatch keys excluded. Levels refuse saved-tensor hooks, which checkpoint
    regions use; a trace apart from the levels may use them.
    """
    with at_level(None):
        depth, duals = get_dynamic_layer_stack_depth(), forward_ad._current_level
        hooks_refused = None if _saved_tensors_hooks_is_enabled() else _saved_tensors_hooks_get_disabled_error_message()
        _saved_tensors_hooks_enable()
        guard = _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set())
        try:
            with guard:
                yield
        finally:
            if hooks_refused is not None:
                _saved_tensors_hooks_disable(hooks_refused)
            if get_dynamic_layer_stack_depth() > depth:
                pop_dynamic_layer_stack_and_undo_to_depth(depth)
            while forward_ad._current_level > duals:
                forward_ad.exit_dual_level()  # type: ignore[no-untyped-call]
