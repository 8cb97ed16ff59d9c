"""The door to private torch, second part: the levels of `torch.func`, and forward mode.

Each transform that is being carried out is one level of a stack, with a number from 1 upwards. A tensor that a
transform acts on is wrapped by its level; level 0 is plain torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
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
    _vmapmode_decrement_nesting,
    _vmapmode_increment_nesting,
)
from torch._C._autograd import _get_current_graph_task_keep_graph as graph_is_kept
from torch._C._autograd import (  # type: ignore[attr-defined]
    _saved_tensors_hooks_disable,
    _saved_tensors_hooks_enable,
    _saved_tensors_hooks_get_disabled_error_message,
    _saved_tensors_hooks_is_enabled,
)
from torch._C._functorch import (  # type: ignore[attr-defined]
    CGradInterpreterPtr,
    CJvpInterpreterPtr,
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,
    _unwrap_batched,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_dynamic_layer_stack_depth,
    get_interpreter_stack,
    get_unwrapped,
    is_dead_tensor_wrapper,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    maybe_get_level,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    pop_dynamic_layer_stack_and_undo_to_depth,
    push_dynamic_layer_stack,
    unwrap_if_dead,
)
from torch._functorch.eager_transforms import _autograd_grad
from torch._functorch.utils import enable_single_level_autograd_function as single_level_allowed
from torch._subclasses.fake_tensor import is_fake as is_any_fake
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
GRAD, JVP, VMAP = TransformType.Grad, TransformType.Jvp, TransformType.Vmap

__all__ = [
    "GRAD",
    "JVP",
    "Level",
    "OlderVmap",
    "PLAIN_TYPES",
    "SingleLevelFunction",
    "VMAP",
    "alive",
    "apart",
    "at_level",
    "below",
    "dual_parts",
    "forward_mode_active",
    "graph_is_kept",
    "has_wrapped_tangent",
    "highest_level",
    "in_older_vmap",
    "in_vmap",
    "innermost_level",
    "is_at",
    "is_dead",
    "is_fake",
    "is_last_backward",
    "is_transformed",
    "is_wrapped",
    "kinds_of_levels",
    "make_dual",
    "single_level_allowed",
    "tracked_and_fake",
    "transforms_active",
    "unwrap",
    "versions",
    "wrap",
]

is_wrapped = is_functorch_wrapped_tensor
is_dead = is_dead_tensor_wrapper
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


def forward_mode_active() -> bool:
    """Returns whether a forward-mode level is open, by dual numbers or by `torch.func.jvp`."""
    return forward_ad._current_level >= 0


def in_vmap() -> bool:
    """Returns whether a vmap level is active."""
    return any(level.kind == VMAP for level in levels())


def is_transformed(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether a transform acts on one of the tensors, or one carries a tangent."""
    if any(map(is_functorch_wrapped_tensor, tensors)):
        return True
    return forward_mode_active() and any(_tangent(t) is not None for t in tensors)


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
        wanted = wanted or tensor.requires_grad or (dual and _tangent(tensor) is not None)
        tracked.append(wanted and differentiable)
    return tuple(tracked), fake


def is_fake(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor that no transform acts on has no data: it is being traced."""
    return type(tensor) not in PLAIN_TYPES and is_any_fake(tensor)


def _tangent(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tangent that a plain tensor carries."""
    if not forward_mode_active() or is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor):
        return None
    with at_level(None):
        return dual_parts(tensor)[1]


class OlderVmap:
    """The vmap of `is_grads_batched` and gradcheck, which is no level of `torch.func`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.number = _vmapmode_increment_nesting() - 1
        _vmapmode_decrement_nesting()
        self.size = next(self.unwrap_batch(t)[0].shape[0] for t in tensors if is_legacy_batchedtensor(t))

    def batch(self) -> tuple[int, str]:
        """Returns the batch size, and that random ops are refused."""
        return self.size, "error"

    def unwrap_batch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Returns what is wrapped, with the batch as first dimension, and 0; None if it is not wrapped."""
        if not is_legacy_batchedtensor(tensor):
            return tensor, None
        return torch._remove_batch_dim(tensor, self.number, 1, 0), 0

    def add_batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor wrapped, whose first dimension is the batch."""
        return torch._add_batch_dim(tensor, 0, self.number)


def in_older_vmap(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether the older vmap acts on one of the tensors."""
    return any(map(is_legacy_batchedtensor, tensors))


def has_wrapped_tangent(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether a plain tensor carries a tangent that a transform acts on, as vmap of dual numbers makes it."""
    tangents = [_tangent(t) for t in tensors] if forward_mode_active() else ()
    return any(t is not None and (is_functorch_wrapped_tensor(t) or is_legacy_batchedtensor(t)) for t in tangents)


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns how often each tensor was changed in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def is_last_backward(level: Level | None, argument: torch.Tensor) -> bool:
    """Returns whether the backward that runs is that of `torch.func.grad` itself for a level.

    Not if the level has ended: another may have its number by now, but does not wrap what it wrapped.

    It is the last thing that happens at the level, so what it computes there is not differentiated there again.
    """
    if level is None or maybe_get_level(argument) != level.number:
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.autograd.grad.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_back.f_code is _autograd_grad.__code__


def alive(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without wrappers of transforms that have ended."""
    while is_dead_tensor_wrapper(tensor):
        tensor = unwrap_if_dead(tensor)
    return tensor


def highest_level(tensors: Sequence[torch.Tensor], *, every_vmap: bool = False) -> Level | None:
    """Returns the highest level that wraps one of the tensors, or is a vmap level; None if there is none."""
    number, top = max(map(maybe_get_level, tensors), default=-1), peek_interpreter_stack()
    if top is not None and top.level() == number:
        return Level(top)
    for raw in reversed(get_interpreter_stack() or ()):
        if raw.level() == number or (every_vmap and raw.key() == VMAP):
            return Level(raw)
    return None


def innermost_level() -> Level | None:
    """Returns the highest level of all; None if no transform is active."""
    raw = peek_interpreter_stack()
    return None if raw is None else Level(raw)


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
    dual = forward_mode_active() and any(_tangent(tensor) is not None for tensor in plain)
    return kinds | {JVP} if dual else kinds


def is_at(tensor: torch.Tensor, level: Level | None) -> bool:
    """Returns whether a level wraps the tensor; any tensor is at level None, plain torch."""
    return level is None or maybe_get_level(tensor) == level.number


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


def below(level: Level | None, *, within: bool = False) -> AbstractContextManager[Any]:
    """Lets work go on below a level, the highest one; there is nothing below None. `within` as in `Lowered`."""
    return NOTHING if level is None else Lowered(level, within=within)


def unwrap(tensor: torch.Tensor, level: Level | None) -> torch.Tensor:
    """Returns what a grad or jvp level wraps; the tensor itself if the level does not wrap it."""
    return tensor if level is None else _unwrap_for_grad(tensor, level.number)


def wrap(tensor: torch.Tensor, level: Level | None) -> torch.Tensor:
    """Returns the tensor wrapped by a grad or jvp level."""
    return tensor if level is None else _wrap_for_grad(tensor, level.number)


def dual_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the primal and the tangent of a tensor; None if it has no tangent."""
    primal, tangent = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return (primal, tangent) if tangent is not None else (tensor, None)


def make_dual(primal: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with a tangent."""
    return forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call, no-any-return]
