"""`TensorSpec`: what compiled code assumes about a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from scoped_fn._errors import SpecError
from scoped_fn._torch.tensors import PLAIN_TYPES

GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo one, are spread evenly and never repeat


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

    @property
    def differentiable(self) -> bool:
        """Whether such tensors can have gradients: floating point or complex ones."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def dense(self) -> TensorSpec:
        """Returns the spec of such tensors without gaps or overlaps in memory, and without a gradient."""
        return TensorSpec(self.shape, _dense(self.shape, self.stride), self.dtype, self.device, False)

    def stand_in(self) -> torch.Tensor:
        """Returns a tensor of this spec whose values do not matter."""
        return self.filled(lambda made: None)

    def filled(self, fill: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """Returns a tensor of this spec; `fill` writes to it, once where elements share memory as expanded ones do."""
        shape = [1 if not stride else size for size, stride in zip(self.shape, self.stride, strict=True)]
        made = torch.empty_strided(shape, self.stride, dtype=self.dtype, device=self.device)
        fill(made)
        return made.expand(self.shape)

    def example(self, attempt: int = 0) -> torch.Tensor:
        """Returns a tensor of harmless values: first fractions and zeros; then nothing singular, and ones."""

        def fill(made: torch.Tensor) -> None:
            if not self.differentiable:
                made.fill_(attempt)
                return
            spread = torch.arange(made.numel(), dtype=torch.float64, device=self.device) * GOLDEN % 1
            made.copy_((0.25 + spread / 2).reshape(made.shape))
            if attempt and made.dim() > 1 and made.shape[-1] == made.shape[-2]:
                made.diagonal(dim1=-2, dim2=-1).add_(made.shape[-1])

        return self.filled(fill)

    def fit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a plain tensor of this shape in the memory layout of the spec."""
        if tensor.is_conj() or tensor.is_neg():
            tensor = plain(tensor)
        return tensor if tensor.stride() == self.stride else with_stride(tensor, self.stride)


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


def with_stride(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Returns a copy of the tensor in another memory layout."""
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def laid_out(tensor: torch.Tensor) -> TensorSpec:
    """Returns the spec of a tensor in dense memory: its own order of dimensions, without gaps or overlaps."""
    return TensorSpec(tensor.shape, _dense(tensor.shape, tensor.stride()), tensor.dtype, tensor.device, False)


def _dense(shape: torch.Size, stride: Sequence[int]) -> tuple[int, ...]:
    """Returns strides in the order of the given ones; row by row where these overlap."""
    overlap = any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True))
    order = list(range(len(shape))) if overlap else sorted(range(len(shape)), key=lambda d: -stride[d])
    made, step = [1] * len(shape), 1
    for d in reversed(order):
        made[d] = step
        step *= max(shape[d], 1)
    return tuple(made)
