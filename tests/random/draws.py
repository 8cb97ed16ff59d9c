"""Functions that draw, and what they must give: written with JAX's functions, from the key of each draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.random.oracle import drawn, keys_of

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@dataclass(frozen=True, eq=False)
class Draw:
    """A function that draws.

    Attributes:
        name: Its name in test ids.
        function: What is compiled, of one tensor.
        expected: The value, from the input and the key of each draw.
        x: The input.
        draws: How many keys it takes.
        epsilons: How many roundings the value may be off; 0 for none at all.
    """

    name: str
    function: Callable[[Tensor], Any]
    expected: Callable[..., Any]
    x: Tensor
    draws: int = 1
    epsilons: float = 0.0


def ones(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def values(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Numbers between -1 and 1, the same each time."""
    return torch.linspace(-1, 1, math.prod(shape), dtype=F64).reshape(shape).to(dtype)


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


def uniform(key: Tensor, x: Any, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Uniform numbers of a tensor's shape and dtype, or of a shape."""
    shape, dtype = (tuple(x.shape), dtype or x.dtype) if isinstance(x, Tensor) else (x, dtype or F32)
    return drawn("uniform", key, shape, dtype=dtype, minval=low, maxval=high, one_by_one=True)


def normal(key: Tensor, x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Normal numbers of a tensor's shape and dtype, or of a shape."""
    shape, dtype = (tuple(x.shape), dtype or x.dtype) if isinstance(x, Tensor) else (x, dtype or F32)
    return drawn("normal", key, shape, dtype=dtype)


def integers(key: Tensor, shape: tuple[int, ...], low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers in [low, high); floats are integers of 64 bits, cast."""
    if dtype.is_floating_point:
        return drawn("randint", key, shape, low, high, dtype=torch.int64).to(dtype)
    return drawn("randint", key, shape, low, high, dtype=dtype)


def choice(key: Tensor, weights: Tensor, count: int, replace: bool) -> Tensor:
    """Indices drawn by weight."""
    return drawn("categorical", key, weights.log(), -1, (count,), replace, wide=True)


def attention(x: Tensor, key: Tensor, p: float, causal: bool = False) -> Tensor:
    """Self-attention whose weights are dropped."""
    scores = x @ x.transpose(-1, -2) / math.sqrt(x.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(x.shape[-2], x.shape[-2]).tril().logical_not(), -math.inf)
    return dropped(scores.softmax(-1), key, p) @ x


DROPOUTS = [
    *(
        Draw(f"dropout {dtype}", lambda x: F.dropout(x, 0.3), lambda x, k: dropped(x, k, 0.3), values(40, 8, dtype=dtype))
        for dtype in (F32, F64, BF16, F16)
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

FLOATS = [
    Draw("rand", lambda x: x + torch.rand(30, 2), lambda x, k: x + uniform(k, (30, 2)), values(30, 2)),
    Draw("rand float64", lambda x: torch.rand(9, dtype=F64), lambda x, k: uniform(k, (9,), dtype=F64), ones(1)),
    *(
        Draw(f"rand_like {dtype}", torch.rand_like, lambda x, k: uniform(k, x), ones(4, 7, dtype=dtype))
        for dtype in (F32, F64, BF16, F16)
    ),
    Draw("uniform_", lambda x: (x * 1).uniform_(-2, 3), lambda x, k: uniform(k, x, -2.0, 3.0), ones(40), epsilons=4),
    Draw("randn", lambda x: x + torch.randn(50), lambda x, k: x + normal(k, (50,)), ones(50), epsilons=2),
    *(
        Draw(f"randn_like {dtype}", torch.randn_like, lambda x, k: normal(k, x), ones(6, 5, dtype=dtype), epsilons=1)
        for dtype in (F32, F64, BF16, F16)
    ),
    Draw("normal_", lambda x: (x * 1).normal_(2, 0.5), lambda x, k: 2 + 0.5 * normal(k, x), ones(60), epsilons=2),
    Draw(
        "normal of tensors",
        lambda x: torch.normal(x, x * x),
        lambda x, k: x + x * x * normal(k, x),
        values(40),
        epsilons=2,
    ),
    Draw(
        "normal of a mean", lambda x: torch.normal(x, 0.5), lambda x, k: x + 0.5 * normal(k, x), values(9), epsilons=2
    ),
    Draw(
        "normal of a size",
        lambda x: x + torch.normal(1.0, 2.0, (9,)),
        lambda x, k: x + (1 + 2 * normal(k, (9,))),
        ones(9),
        epsilons=4,
    ),
    Draw(
        "exponential_",
        lambda x: (x * 1).exponential_(2.0),
        lambda x, k: drawn("exponential", k, (70,)) / 2,
        ones(70),
        epsilons=8,
    ),
    Draw(
        "cauchy_",
        lambda x: (x * 1).cauchy_(1.0, 0.5),
        lambda x, k: 1 + 0.5 * drawn("cauchy", k, (70,)),
        ones(70),
        epsilons=8,
    ),
    Draw(
        "log_normal_",
        lambda x: (x * 1).log_normal_(0.5, 0.25),
        lambda x, k: (0.5 + 0.25 * normal(k, x)).exp(),
        ones(70),
        epsilons=8,
    ),
    Draw(
        "rrelu",
        lambda x: F.rrelu(x, 0.1, 0.3, True),
        lambda x, k: torch.where(x < 0, x * uniform(k, x, 0.1, 0.3), x),
        values(60),
        epsilons=4,
    ),
    Draw(
        "gumbel_softmax",
        lambda x: F.gumbel_softmax(x, tau=0.7),
        lambda x, k: ((x - drawn("exponential", keys_of(k, 1)[0], (8, 5)).log()) / 0.7).softmax(-1),
        values(8, 5),
        epsilons=40,
    ),
]

INTEGERS = [
    Draw("randint", lambda x: torch.randint(-4, 10, (40,)), lambda x, k: integers(k, (40,), -4, 10), ones(1)),
    Draw("randint up to", lambda x: torch.randint(10, (9, 2)), lambda x, k: integers(k, (9, 2), 0, 10), ones(1)),
    Draw(
        "randint int32",
        lambda x: torch.randint(3, 9, (40,), dtype=torch.int32),
        lambda x, k: integers(k, (40,), 3, 9, torch.int32),
        ones(1),
    ),
    Draw(
        "randint float32",
        lambda x: torch.randint(3, 9, (40,), dtype=F32),
        lambda x, k: integers(k, (40,), 3, 9, F32),
        ones(1),
    ),
    Draw("randint_like", lambda x: torch.randint_like(x, 5), lambda x, k: integers(k, (40,), 0, 5, F32), ones(40)),
    Draw("random_", lambda x: (x * 1).random_(2, 7), lambda x, k: integers(k, (40,), 2, 7, F32), ones(40)),
    Draw("randperm", lambda x: torch.randperm(17), lambda x, k: drawn("permutation", k, 17, wide=True), ones(1)),
    Draw(
        "multinomial",
        lambda x: torch.multinomial(x, 12, replacement=True),
        lambda x, k: choice(k, x, 12, True),
        torch.tensor([0.1, 3.0, 0.5, 1.0]),
    ),
    Draw(
        "multinomial without replacement",
        lambda x: torch.multinomial(x, 3),
        lambda x, k: choice(k, x, 3, False),
        torch.tensor([0.1, 3.0, 0.5, 1.0]),
    ),
    *(
        Draw(
            f"bernoulli {dtype}",
            torch.bernoulli,
            lambda x, k: drawn("bernoulli", k, x, wide=x.dtype == F64).to(x.dtype),
            values(60, dtype=dtype).abs(),
        )
        for dtype in (F32, F64, BF16, F16)
    ),
    Draw(
        "bernoulli of a number",
        lambda x: torch.bernoulli(x, 0.3),
        lambda x, k: drawn("bernoulli", k, 0.3, (60,)).to(F32),
        ones(60),
    ),
    Draw(
        "bernoulli_",
        lambda x: (x * 1).bernoulli_(0.3),
        lambda x, k: drawn("bernoulli", k, 0.3, (60,)).to(F64),
        ones(60, dtype=F64),
    ),
    Draw(
        "bernoulli_ of a tensor",
        lambda x: torch.empty(60).bernoulli_(x),
        lambda x, k: drawn("bernoulli", k, x).to(F32),
        values(60).abs(),
    ),
    Draw(
        "geometric_",
        lambda x: (x * 1).geometric_(0.3),
        lambda x, k: drawn("geometric", k, torch.tensor(0.3), (60,)).to(F32),
        ones(60),
    ),
]


def several(x: Tensor) -> Tensor:
    """Three draws, of several operations."""
    first = F.dropout(x, 0.2)
    noise = torch.randn(8, 4)
    return first + noise * torch.rand(4)


def twice(x: Tensor) -> Tensor:
    """Two draws of one operation in two places."""
    return F.dropout(F.dropout(x, 0.5) + 1, 0.5)


SEVERAL = [
    Draw(
        "several",
        several,
        lambda x, a, b, c: dropped(x, a, 0.2) + normal(b, (8, 4)) * uniform(c, (4,)),
        values(8, 4),
        draws=3,
        epsilons=4,
    ),
    Draw("twice", twice, lambda x, a, b: dropped(dropped(x, a, 0.5) + 1, b, 0.5), values(8, 4), draws=2),
    Draw(
        "a loop",
        lambda x: torch.stack([torch.rand(3) for _ in range(4)]) * x,
        lambda x, *keys: torch.stack([uniform(key, (3,)) for key in keys]) * x,
        ones(3),
        draws=4,
    ),
    Draw(
        "layers",
        nn.Sequential(nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.1)).train(),
        lambda x, a, b: dropped(dropped(x, a, 0.5).relu(), b, 0.1),
        values(9, 9),
        draws=2,
    ),
]

ALL = [*DROPOUTS, *FLOATS, *INTEGERS, *SEVERAL]
