"""`TensorSpec`: what compiled code assumes about a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scoped_fn._errors import SpecError

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True)
class TensorSpec:
    """Shape, stride (in elements), dtype, device and whether a gradient is wanted."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __str__(self) -> str:
        device = "" if self.device.type == "cpu" else f" on {self.device}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{device}"

    def fake(self) -> torch.Tensor:
        """Returns a tensor of this spec in the fake mode that is on."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


def spec_of(tensor: torch.Tensor, name: str) -> TensorSpec:
    """Returns the spec of a plain, strided tensor.

    Raises:
        SpecError: It is a subclass, or not strided.
    """
    if type(tensor) not in PLAIN_TYPES or tensor.layout != torch.strided:
        kind = type(tensor).__name__ if type(tensor) not in PLAIN_TYPES else f"tensor with layout {tensor.layout}"
        raise SpecError(f"Expected {name} to be a plain strided tensor, got a {kind}. Convert it first.")
    return TensorSpec(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def matches(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], need_grad: bool) -> bool:
    """Returns whether each tensor is what its spec says; `requires_grad` counts only where gradients are wanted."""
    for spec, tensor in zip(specs, tensors, strict=True):
        if (
            tensor.shape != spec.shape
            or tensor.dtype is not spec.dtype
            or tensor.stride() != spec.stride
            or tensor.device != spec.device
            or (need_grad and tensor.requires_grad is not spec.requires_grad)
            or type(tensor) not in PLAIN_TYPES
        ):
            return False
    return True


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with a pending conjugate or negative bit carried out; compiled code reads raw memory."""
    return tensor.resolve_conj().resolve_neg()
