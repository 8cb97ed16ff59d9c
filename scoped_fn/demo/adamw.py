"""AdamW as a pure function over dictionaries of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Moments:
    """What AdamW remembers between steps.

    Attributes:
        count: Number of updates so far.
        mean: Running mean of the gradient, by parameter name.
        square: Running mean of its square, by parameter name.
    """

    count: int
    mean: Tensors
    square: Tensors


def init_moments(params: Tensors) -> Moments:
    """Returns the moments before the first update: zeros."""
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    return Moments(0, zeros, zeros)


def adamw(
    moments: Moments,
    params: Tensors,
    grads: Tensors,
    *,
    learning_rate: float,
    decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.99),
) -> tuple[Moments, Tensors]:
    """Returns the next moments and parameters (Loshchilov and Hutter, 2019); matrices decay, vectors do not."""
    count = moments.count + 1
    first, second = betas
    mean = {name: torch.lerp(moments.mean[name], grad, 1 - first) for name, grad in grads.items()}
    square = {name: torch.lerp(moments.square[name], grad * grad, 1 - second) for name, grad in grads.items()}
    rate = learning_rate / (1 - first**count)
    correction = (1 - second**count) ** -0.5
    updated = {}
    for name, param in params.items():
        kept = param * (1 - learning_rate * decay) if param.dim() > 1 else param
        scale = square[name].sqrt().mul_(correction).add_(1e-8)
        updated[name] = torch.addcdiv(kept, mean[name], scale, value=-rate)
    return Moments(count, mean, square), updated
