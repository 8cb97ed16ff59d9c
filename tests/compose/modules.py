"""Cases that are modules, and the layers that networks are made of."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.compose.case import WRITES_BATCH, Case, named, numbers


class WrittenBatchNorm(nn.BatchNorm1d):
    """Batch norm in training, in elementary operations; the running statistics stay."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = x - x.mean(0)
        return apart / (apart.square().mean(0) + self.eps).sqrt() * self.weight + self.bias


class WrittenLayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension, in elementary operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = x - x.mean(-1, keepdim=True)
        return apart / (apart.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


def seeded(module: nn.Module) -> nn.Module:
    """The module in float64 with parameters that depend on their names' order alone; running variances stay ones."""
    module = module.double()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=50 + seed))
    return module


def mlp() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)))


def small_mlp() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(2, 1), nn.Softplus()))


def batch_norm(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(2, 2), norm(2), nn.Tanh()))


def batch_norm_evaluated() -> nn.Module:
    module = batch_norm().eval()
    module[1].running_mean.fill_(0.3)
    return module


def batch_statistics(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
    return seeded(nn.Sequential(norm(2, track_running_stats=False), nn.Linear(2, 1)))


def layer_norm(norm: type[nn.Module] = nn.LayerNorm) -> nn.Module:
    return seeded(nn.Sequential(norm(3), nn.GELU()))


def embedding() -> nn.Module:
    return seeded(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1)))


def fused_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def written_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ value


def convolution(weight: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    return F.conv2d(image, weight, stride=2, padding=1).tanh()


def pooling(image: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(image, 2) * F.max_pool2d(image, 2)


def heads() -> tuple[torch.Tensor, ...]:
    query, key, value = (numbers(1, 2, 3, 2, seed=seed) for seed in range(3))
    return query, key, value


# Found with finite differences on torch 2.13: the fused derivative takes mean and deviation for constants.
NORMS = dict.fromkeys(
    ("hessian", "hessian of the last argument", "jacrev of jacrev", "jacrev of jacfwd", "jacfwd of jacfwd",
     "hvp reverse over forward", "jvp of jvp", "jvp of vmap of grad"),
    "the fused norm's second derivative leaves out a part",
)  # fmt: skip

MODULE_CASES = (
    Case("mlp", mlp, lambda: (numbers(2, 2),)),
    Case("small mlp", small_mlp, lambda: (numbers(2, 2),), deep=True),
    Case(
        "batch norm",
        batch_norm,
        lambda: (numbers(4, 2),),
        twin=lambda: batch_norm(WrittenBatchNorm),
        eager_cannot={"batched": WRITES_BATCH},
        eager_wrong=NORMS,
    ),
    Case("batch norm evaluated", batch_norm_evaluated, lambda: (numbers(3, 2),)),
    Case(
        "batch statistics",
        batch_statistics,
        lambda: (numbers(4, 2),),
        twin=lambda: batch_statistics(WrittenBatchNorm),
        eager_wrong=NORMS,
    ),
    Case(
        "layer norm", layer_norm, lambda: (numbers(2, 3),), twin=lambda: layer_norm(WrittenLayerNorm), eager_wrong=NORMS
    ),
    Case("embedding", embedding, lambda: (torch.tensor([[0, 1], [1, 3]]),), ()),
    named(
        fused_attention,
        heads,
        0,
        1,
        2,
        twin=lambda: written_attention,
        eager_cannot={
            "forward": "the fused kernel has no forward mode",
            "second": "the fused backward has no derivative",
        },
    ),
    named(written_attention, heads, 0, 1, 2),
    named(convolution, lambda: (numbers(2, 1, 2, 2), numbers(1, 1, 4, 4)), 0, 1),
    named(pooling, lambda: (numbers(1, 1, 4, 4),)),
)
