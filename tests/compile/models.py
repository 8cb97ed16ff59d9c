"""Small models that several test files compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Loss(nn.Module):
    """A small regression loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - target).square().mean()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 3, generator=generator), torch.randn(6, 1, generator=generator)


class StraightThrough(torch.autograd.Function):
    """Rounds; its gradient is ten times the identity, which no tracing of the forward could find."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 10


class Tied(nn.Module):
    """Embedding and head share one weight; the head also has its own bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens).tanh())


class TwoPaths(nn.Module):
    """One submodule under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.first(x).tanh())


class Spare(nn.Module):
    """Has a parameter that forward never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.spare = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.detach()
        self.calls.add_(1)
        return x * self.weight + self.total


class Reassigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running = self.running * 0.5 + x.detach()
        return x + self.running
