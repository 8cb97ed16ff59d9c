"""Dropouts of every kind, and what they must give."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.random.draws import BF16, F16, F32, F64, Draw, ones, values
from tests.random.oracle import drawn


def keep(key: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    """The mask of a dropout: drawn in float32 whatever is dropped."""
    return drawn("bernoulli", key, 1 - p, shape)


def dropped(x: Tensor, key: Tensor, p: float, shape: tuple[int, ...] | None = None) -> Tensor:
    """What dropout gives."""
    mask = keep(key, p, tuple(x.shape) if shape is None else shape)
    return torch.where(mask, x * (1 / (1 - p)), torch.zeros((), dtype=x.dtype))


def alpha_dropped(x: Tensor, key: Tensor, p: float, shape: tuple[int, ...] | None = None) -> Tensor:
    """What keeps mean and variance of a SELU network (Klambauer and others, 2017)."""
    mask = keep(key, p, tuple(x.shape) if shape is None else shape)
    alpha = 1.7580993408473766
    scale = ((alpha * alpha * p + 1) * (1 - p)) ** -0.5
    kept = mask.to(x.dtype)
    return x * (kept * scale) + ((kept - 1) * (alpha * scale) + alpha * scale * p)


def attention(x: Tensor, key: Tensor, p: float, causal: bool = False) -> Tensor:
    """Self-attention whose weights are dropped."""
    scores = x @ x.transpose(-1, -2) / math.sqrt(x.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(x.shape[-2], x.shape[-2]).tril().logical_not(), -math.inf)
    return dropped(scores.softmax(-1), key, p) @ x


DROPOUTS = [
    *(
        Draw(f"dropout {one}", lambda x: F.dropout(x, 0.3), lambda x, k: dropped(x, k, 0.3), values(40, 8, dtype=one))
        for one in (F32, F64, BF16, F16)
    ),
    Draw("Dropout", nn.Dropout(0.4).train(), lambda x, k: dropped(x, k, 0.4), values(70000)),
    Draw("dropout of nothing", lambda x: F.dropout(x, 0.4), lambda x, k: dropped(x, k, 0.4), ones(0, 3)),
    Draw("dropout of a number", lambda x: F.dropout(x, 0.4), lambda x, k: dropped(x, k, 0.4), torch.tensor(2.0)),
    Draw("dropout_", lambda x: F.dropout(x * 2, 0.3, inplace=True), lambda x, k: dropped(x * 2, k, 0.3), values(50)),
    Draw("all dropped", lambda x: F.dropout(x, 1.0), lambda x, k: torch.zeros_like(x), values(20)),
    Draw(
        "native_dropout",
        lambda x: torch.native_dropout(x, 0.25, True),
        lambda x, k: (dropped(x, k, 0.25), keep(k, 0.25, (6, 7))),
        values(6, 7),
    ),
    Draw("dropout1d", lambda x: F.dropout1d(x, 0.5), lambda x, k: dropped(x, k, 0.5, (5, 8, 1)), values(5, 8, 3)),
    Draw("dropout2d", lambda x: F.dropout2d(x, 0.5), lambda x, k: dropped(x, k, 0.5, (5, 8, 1, 1)), values(5, 8, 2, 3)),
    Draw("Dropout2d", nn.Dropout2d(0.2).train(), lambda x, k: dropped(x, k, 0.2, (5, 8, 1, 1)), values(5, 8, 2, 3)),
    Draw(
        "dropout3d",
        lambda x: F.dropout3d(x, 0.5),
        lambda x, k: dropped(x, k, 0.5, (5, 8, 1, 1, 1)),
        values(5, 8, 2, 3, 2),
    ),
    Draw(
        "alpha_dropout", lambda x: F.alpha_dropout(x, 0.3, True), lambda x, k: alpha_dropped(x, k, 0.3), values(90),
        epsilons=4,
    ),
    Draw(
        "feature_alpha_dropout",
        lambda x: F.feature_alpha_dropout(x, 0.3, True),
        lambda x, k: alpha_dropped(x, k, 0.3, (5, 8, 1)),
        values(5, 8, 3),
        epsilons=4,
    ),
    Draw(
        "scaled_dot_product_attention",
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
        lambda x, k: attention(x, k, 0.3),
        values(2, 3, 6, 4),
        epsilons=20,
    ),
    Draw(
        "causal attention",
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True),
        lambda x, k: attention(x, k, 0.3, causal=True),
        values(2, 6, 4),
        epsilons=20,
    ),
]  # fmt: skip
