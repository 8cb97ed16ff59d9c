"""Custom autograd.Functions with rules for forward mode and for vmap, or with a backward of first order only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tests.compose.custom import ForwardSurrogate, SavesInputs
from tests.compose.modules import seeded


class OwnVmap(torch.autograd.Function):
    """Scales by 1, but by 10 under vmap: so one sees whose rule batched it. Its gradient has a factor of 3."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        return x * 10, in_dims[0]


class OwnEverything(torch.autograd.Function):
    """The cube, with a factor of 2 in the backward and in the tangent, and with its own rule for vmap."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 6 * x**2

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return tangent * 6 * x**2

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        return OwnEverything.apply(x), in_dims[0]


class Once(torch.autograd.Function):
    """The sine; its backward calls no autograd, and so has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 2


class OnceFunctional(SavesInputs):
    """`Once` in the style that torch.func takes."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 2


class Counted(nn.Module):
    """Batch norm, a custom Function with a rule for forward mode, and a buffer that is assigned anew."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        hidden = self.norm(self.first(x))
        return ForwardSurrogate.apply(hidden) * hidden


def counted() -> nn.Module:
    return seeded(Counted())
