"""The second half of the door to private torch: the levels of `torch.func`, and forward mode.

Each transform that is being carried out is one level of a stack, with a number from 1 upwards. A tensor that a
transform acts on is wrapped by its level; level 0 is plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._C import (
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
)
from torch._C._autograd import _get_current_graph_task_keep_graph as graph_is_kept
from torch._C._functorch import (
    TransformType,
    _add_batch_dim,
    _grad_decrement_nesting,
    _grad_increment_nesting,
    _jvp_decrement_nesting,
    _jvp_increment_nesting,
    _unwrap_batched,
    _unwrap_for_grad,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    _wrap_for_grad,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    is_legacy_batchedtensor,
    maybe_get_level,
    peek_interpreter_stack,
    set_inplace_requires_grad_allowed,
    unwrap_if_dead,
)
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters as all_levels
from torch._functorch.utils import enable_single_level_autograd_function as single_level_allowed
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction

Flat = Callable[..., Sequence[torch.Tensor]]
GRAD, JVP, VMAP = TransformType.Grad, TransformType.Jvp, TransformType.Vmap

__all__ = [
    "GRAD",
    "JVP",
    "VMAP",
    "SingleLevelFunction",
    "add_batch",
    "alive",
    "apart",
    "at_level",
    "below",
    "differentiable_flat",
    "below_from_within",
    "dual_parts",
    "forward_mode_active",
    "graph_is_kept",
    "has_wrapped_tangent",
    "highest_level",
    "in_vmap",
    "innermost_level",
    "is_at",
    "is_legacy",
    "is_tracked",
    "is_transformed",
    "is_wrapped",
    "kinds_of_levels",
    "jvp_flat",
    "make_dual",
    "single_level_allowed",
    "transforms_active",
    "unwrap",
    "unwrap_batch",
    "vjp_flat",
    "vmap_flat",
    "wrap",
]

is_wrapped = is_functorch_wrapped_tensor
transforms_active = peek_interpreter_stack


def forward_mode_active() -> bool:
    """Returns whether a forward-mode level is open, by dual numbers or by `torch.func.jvp`."""
    return forward_ad._current_level >= 0


def in_vmap() -> bool:
    """Returns whether a vmap level is active."""
    return any(level.key() == VMAP for level in all_levels())


def is_transformed(tensor: torch.Tensor) -> bool:
    """Returns whether a transform acts on the tensor, or it carries a tangent."""
    return is_functorch_wrapped_tensor(tensor) or _is_dual(tensor)


def is_tracked(tensor: torch.Tensor) -> bool:
    """Returns whether a derivative of any level may be taken of the tensor."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    kinds = {level.level(): level.key() for level in all_levels()}
    while is_functorch_wrapped_tensor(tensor):
        if kinds.get(maybe_get_level(tensor)) == JVP or tensor.requires_grad:
            return True
        tensor = get_unwrapped(tensor)
    return tensor.requires_grad or _is_dual(tensor)


def _is_dual(tensor: torch.Tensor) -> bool:
    """Returns whether a plain tensor carries a tangent."""
    if not forward_mode_active():
        return False
    with at_level(None):
        return forward_ad.unpack_dual(tensor).tangent is not None


def is_legacy(tensor: torch.Tensor) -> bool:
    """Returns whether the older vmap acts on the tensor or its tangent: of `is_grads_batched` and gradcheck."""
    if is_legacy_batchedtensor(tensor):
        return True
    if is_functorch_wrapped_tensor(tensor) or not forward_mode_active():
        return False
    with at_level(None):
        tangent = forward_ad.unpack_dual(tensor).tangent
    return tangent is not None and is_legacy_batchedtensor(tangent)


def has_wrapped_tangent(tensor: torch.Tensor) -> bool:
    """Returns whether a plain tensor carries a tangent that a transform acts on, as vmap of dual numbers makes it."""
    if is_functorch_wrapped_tensor(tensor):
        return False
    with at_level(None):
        tangent = forward_ad.unpack_dual(tensor).tangent
    return tangent is not None and is_functorch_wrapped_tensor(tangent)


def alive(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without wrappers of transforms that have ended."""
    while is_functorch_wrapped_tensor(tensor):
        inner = unwrap_if_dead(tensor)
        if inner is tensor:
            break
        tensor = inner
    return tensor


def highest_level(tensors: Sequence[torch.Tensor], *, every_vmap: bool = False) -> Any:
    """Returns the highest level that wraps one of the tensors, or is a vmap level; None if there is none."""
    number = max((maybe_get_level(t) for t in tensors if is_functorch_wrapped_tensor(t)), default=0)
    for level in reversed(all_levels()):
        if level.level() == number or (every_vmap and level.key() == VMAP):
            return level
    return None


def innermost_level() -> Any:
    """Returns the highest level of all; None if no transform is active."""
    levels = all_levels()
    return levels[-1] if levels else None


def kinds_of_levels(tensors: Sequence[torch.Tensor]) -> set[Any]:
    """Returns the kinds of all levels that wrap the tensors, at any depth."""
    numbers: set[int] = set()
    for tensor in tensors:
        while is_functorch_wrapped_tensor(tensor):
            numbers.add(maybe_get_level(tensor))
            tensor = get_unwrapped(tensor)
    kinds = {level.key() for level in all_levels() if level.level() in numbers} if numbers else set()
    return kinds | {JVP} if forward_mode_active() else kinds


def is_at(tensor: torch.Tensor, level: Any) -> bool:
    """Returns whether a level wraps the tensor; any tensor is at level None, plain torch."""
    return level is None or (is_functorch_wrapped_tensor(tensor) and maybe_get_level(tensor) == level.level())


@contextmanager
def at_level(level: Any) -> Iterator[None]:
    """Lets work go on at a level, with the ones above it out of the way; None is plain torch."""
    number = level.level() if level is not None else 0
    with ExitStack() as stack:
        for above in reversed(all_levels()):
            if above.level() > number:
                stack.enter_context(above.lower())
        yield


@contextmanager
def apart() -> Iterator[None]:
    """Lets a capture or a derivation go on in plain torch.

    With a forward-mode level open some of torch's fake operations fail, and leave dispatch keys excluded: put back here.
    """
    with at_level(None):
        with _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()):
            yield


def below(level: Any) -> AbstractContextManager[Any]:
    """Lets work go on below a level, which is the highest one; there is nothing below None."""
    return nullcontext() if level is None else level.lower()


@contextmanager
def below_from_within(level: Any) -> Iterator[None]:
    """As `below`, inside a node's forward, where torch has turned differentiation off; that is for its level only."""
    if level is None:
        yield
    else:
        with torch.enable_grad(), _set_fwd_grad_enabled(True), level.lower():
            yield


def unwrap(tensor: torch.Tensor, level: Any) -> torch.Tensor:
    """Returns what a grad or jvp level wraps; the tensor itself if the level does not wrap it."""
    return tensor if level is None else _unwrap_for_grad(tensor, level.level())


def wrap(tensor: torch.Tensor, level: Any) -> torch.Tensor:
    """Returns the tensor wrapped by a grad or jvp level."""
    return tensor if level is None else _wrap_for_grad(tensor, level.level())


def unwrap_batch(tensor: torch.Tensor, level: Any) -> tuple[torch.Tensor, int | None]:
    """Returns what a vmap level wraps, and which dimension is the batch; None if the level does not wrap it."""
    if not is_functorch_wrapped_tensor(tensor):
        return tensor, None
    return _unwrap_batched(tensor, level.level())  # type: ignore[return-value]


def add_batch(tensor: torch.Tensor, level: Any) -> torch.Tensor:
    """Returns the tensor, whose first dimension is the batch, wrapped by a vmap level."""
    return _add_batch_dim(tensor, 0, level.level())


def dual_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the primal and the tangent of a tensor; None if it has no tangent."""
    primal, tangent = forward_ad.unpack_dual(tensor)
    return (primal, tangent) if tangent is not None else (tensor, None)


def make_dual(primal: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with a tangent."""
    return forward_ad.make_dual(primal, tangent)


def vmap_flat(
    run: Flat, batch_size: int, batched: Sequence[bool], randomness: str, tensors: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, bool]]:
    """Runs a function once for each index of the first dimension of the batched tensors.

    Returns:
        For each result the tensor, and whether its first dimension is the batch.
    """
    number = _vmap_increment_nesting(batch_size, randomness)
    try:
        given = [_add_batch_dim(t, 0, number) if b else t for t, b in zip(tensors, batched, strict=True)]
        parts = [_unwrap_batched(out, number) for out in run(*given)]
    finally:
        _vmap_decrement_nesting()
    return [(out if at in (None, 0) else out.movedim(at, 0), at is not None) for out, at in parts]  # type: ignore[arg-type]


def vjp_flat(
    run: Flat, tensors: Sequence[torch.Tensor], wanted: Sequence[int], cotangents: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Returns the results, and the gradient for each wanted tensor, None where the results do not depend on it.

    Args:
        run: The function.
        tensors: Its arguments.
        wanted: Indices of the arguments to differentiate.
        cotangents: One for each result; None leaves the result out.
    """
    number = _grad_increment_nesting()
    try:
        with torch.enable_grad():
            outs, leaves = _run_with_leaves(run, tensors, wanted, number)
            pairs = [
                (out, cotangent)
                for out, cotangent in zip(outs, cotangents, strict=True)
                if cotangent is not None and _carries_gradient(out, number)
            ]
            grads: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if pairs and wanted:
                ends, given = zip(*pairs, strict=True)
                grads = torch.autograd.grad(ends, leaves, given, create_graph=True, allow_unused=True)
            return (
                [_unwrap_for_grad(out, number) for out in outs],
                [None if grad is None else _unwrap_for_grad(grad, number) for grad in grads],
            )
    finally:
        _grad_decrement_nesting()


def differentiable_flat(run: Flat, tensors: Sequence[torch.Tensor], wanted: Sequence[int]) -> list[bool]:
    """Returns for each result whether it depends on one of the wanted tensors differentiably."""
    number = _grad_increment_nesting()
    try:
        with torch.enable_grad():
            return [_carries_gradient(out, number) for out in _run_with_leaves(run, tensors, wanted, number)[0]]
    finally:
        _grad_decrement_nesting()


def _run_with_leaves(
    run: Flat, tensors: Sequence[torch.Tensor], wanted: Sequence[int], number: int
) -> tuple[Sequence[torch.Tensor], list[torch.Tensor]]:
    given = [_wrap_for_grad(tensor, number) for tensor in tensors]
    leaves = [_leaf(given[i]) for i in wanted]
    return run(*given), leaves


def _carries_gradient(tensor: torch.Tensor, number: int) -> bool:
    return is_gradtrackingtensor(tensor) and maybe_get_level(tensor) == number and tensor.requires_grad


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    set_inplace_requires_grad_allowed(True)
    try:
        return tensor.requires_grad_()
    finally:
        set_inplace_requires_grad_allowed(False)


def jvp_flat(
    run: Flat, tensors: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None]
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Returns each result of the function with its tangent; None where it has none.

    Args:
        run: The function.
        tensors: Its arguments.
        tangents: One for each argument; None for a constant.
    """
    number = _jvp_increment_nesting()
    try:
        with _set_fwd_grad_enabled(True), nullcontext() if forward_mode_active() else forward_ad.dual_level():
            given = [_wrap_for_grad(tensor, number) for tensor in tensors]
            duals = [
                tensor if tangent is None else forward_ad.make_dual(tensor, _wrap_for_grad(tangent, number))
                for tensor, tangent in zip(given, tangents, strict=True)
            ]
            parts = [dual_parts(out) for out in run(*duals)]
            return [
                (_unwrap_for_grad(out, number), None if tangent is None else _unwrap_for_grad(tangent, number))
                for out, tangent in parts
            ]
    finally:
        _jvp_decrement_nesting()
