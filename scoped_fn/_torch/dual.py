"""Forward mode: tensors that carry a tangent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

from scoped_fn._torch.levels import at_level, transforms_active


def forward_mode_active() -> bool:
    """Returns whether a forward-mode level is open, by dual numbers or by `torch.func.jvp`."""
    return forward_ad._current_level >= 0


def in_transform() -> bool:
    """Returns whether a torch.func transform or a forward-mode level is active in this thread."""
    return transforms_active() is not None or forward_ad._current_level >= 0


def dual_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the primal and the tangent of a tensor; None if it has no tangent."""
    primal, tangent = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return (primal, tangent) if tangent is not None else (tensor, None)


def make_dual(primal: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with a tangent."""
    return forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call, no-any-return]


def tangent_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tangent that a plain tensor carries."""
    if not forward_mode_active() or is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor):
        return None
    with at_level(None):
        return dual_parts(tensor)[1]


def has_wrapped_tangent(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether a plain tensor carries a tangent that a transform acts on, as vmap of dual numbers makes it."""
    tangents = [tangent_of(t) for t in tensors] if forward_mode_active() else ()
    return any(t is not None and (is_functorch_wrapped_tensor(t) or is_legacy_batchedtensor(t)) for t in tangents)
