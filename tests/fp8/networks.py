"""Small models that FP8 is tested with, and their data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer block: attention and an MLP, each after a layer norm."""

    def __init__(self, width: int = 16, heads: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, 2 * width, bias=bias), nn.Linear(2 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Loss(nn.Module):
    """The mean squared error of a network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x) - y).square().mean()


class Projections(nn.Module):
    """Three products with one input, as in attention."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x) + self.v(x)


class Twice(nn.Module):
    """One layer that is called two times, the second time with larger numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(3 * self.fc(x).relu())


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class LowRank(nn.Module):
    """A frozen layer with a low-rank adapter that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def mlp(bias: bool = True) -> nn.Sequential:
    """A network (..., 8) to (..., 4)."""
    return nn.Sequential(nn.Linear(8, 16, bias=bias), nn.GELU(), nn.Linear(16, 4, bias=bias))


def loss_of(name: str, dtype: torch.dtype = torch.float32, bias: bool = True) -> Loss:
    """The loss of the MLP or of the block."""
    return Loss(mlp(bias) if name == "mlp" else Block(bias=bias)).to(dtype)


def batches(name: str, count: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Batches for `loss_of(name)`; the size of the numbers changes from step to step."""
    shapes: dict[str, Any] = {"mlp": ((6, 8), (6, 4)), "block": ((2, 5, 16), (2, 5, 16))}
    generator = torch.Generator().manual_seed(1)
    sizes = [2.0 ** ((5 * step) % 7 - 3) for step in range(count)]
    return [
        tuple((size * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes[name]) for size in sizes
    ]
