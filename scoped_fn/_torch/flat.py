"""Functions of flat tensors under one more level of `torch.func`.

They are `torch.vmap`, `torch.func.vjp` and `torch.func.jvp`, but say what depends on what: which results have a batch,
which arguments get no gradient, which results have no tangent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch._C._functorch import (
    _add_batch_dim,
    _grad_decrement_nesting,
    _grad_increment_nesting,
    _unwrap_batched,
    _unwrap_for_grad,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    _wrap_for_grad,
    is_gradtrackingtensor,
    maybe_get_level,
    set_inplace_requires_grad_allowed,
)
from torch._functorch.eager_transforms import enter_jvp_nesting, exit_jvp_nesting
from torch.autograd import forward_ad

from scoped_fn._torch.dual import dual_parts, forward_mode_active, make_dual

Flat = Callable[..., Sequence[torch.Tensor]]

__all__ = ["Flat", "differentiable_flat", "jvp_flat", "vjp_flat", "vmap_flat"]


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
    return [(out if at in (None, 0) else out.movedim(at, 0), at is not None) for out, at in parts]


def vjp_flat(
    run: Flat, tensors: Sequence[torch.Tensor], wanted: Sequence[int], cotangents: Mapping[int, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Returns the results, and the gradient for each wanted tensor, None where the results do not depend on it.

    Args:
        run: The function.
        tensors: Its arguments.
        wanted: Indices of the arguments to differentiate.
        cotangents: By the index of a result; results without one are left out.
    """
    number = _grad_increment_nesting()
    try:
        with torch.enable_grad():
            outs, leaves = _run_with_leaves(run, tensors, wanted, number)
            pairs = [(outs[i], given) for i, given in cotangents.items() if _carries_gradient(outs[i], number)]
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
    number = enter_jvp_nesting()
    try:
        with (
            forward_ad._set_fwd_grad_enabled(True),
            nullcontext() if forward_mode_active() else forward_ad.dual_level(),
        ):
            given = [_wrap_for_grad(tensor, number) for tensor in tensors]
            duals = [
                tensor if tangent is None else make_dual(tensor, _wrap_for_grad(tangent, number))
                for tensor, tangent in zip(given, tangents, strict=True)
            ]
            parts = [dual_parts(out) for out in run(*duals)]
            return [
                (_unwrap_for_grad(out, number), None if tangent is None else _unwrap_for_grad(tangent, number))
                for out, tangent in parts
            ]
    finally:
        exit_jvp_nesting()
