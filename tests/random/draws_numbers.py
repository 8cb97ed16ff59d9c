"""Random floats, integers and truth values, and what they must be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.random.draws import BF16, F16, F32, F64, Draw, normal, ones, uniform, values, wide
from tests.random.oracle import drawn, keys_of


def integers(key: Tensor, shape: tuple[int, ...], low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers in [low, high); floats are integers of 64 bits, cast."""
    if dtype.is_floating_point:
        return drawn("randint", key, shape, low, high, dtype=torch.int64).to(dtype)
    return drawn("randint", key, shape, low, high, dtype=dtype)


def choice(key: Tensor, weights: Tensor, count: int, replace: bool) -> Tensor:
    """Indices drawn by weight."""
    return drawn("categorical", key, weights.log(), -1, (count,), replace, wide=True).long()


def in_a_slice(x: Tensor) -> Tensor:
    """Draws into a part of a tensor, in place."""
    whole = x.clone()
    whole[2:5].uniform_()
    return whole


FLOATS = [
    Draw("rand", lambda x: x + torch.rand(30, 2), lambda x, k: x + uniform(k, (30, 2)), values(30, 2)),
    Draw("rand float64", lambda x: torch.rand(9, dtype=F64), lambda x, k: uniform(k, (9,), dtype=F64), ones(1)),
    *(
        Draw(f"rand_like {dtype}", torch.rand_like, lambda x, k: uniform(k, x), ones(4, 7, dtype=dtype))
        for dtype in (F32, F64, BF16, F16)
    ),
    Draw("uniform_", lambda x: (x * 1).uniform_(-2, 3), lambda x, k: uniform(k, x, -2.0, 3.0), ones(40), epsilons=4),
    Draw(
        "uniform_ of a slice",
        in_a_slice,
        lambda x, k: torch.cat([x[:2], uniform(k, (3,)), x[5:]]),
        values(9),
    ),
    Draw(
        "normal_ of a transposed tensor",
        lambda x: (x * 1).t().normal_(),
        lambda x, k: normal(k, (4, 3)),
        values(3, 4),
        epsilons=2,
    ),
    Draw("randn", lambda x: x + torch.randn(50), lambda x, k: x + normal(k, (50,)), ones(50), epsilons=2),
    *(
        Draw(
            f"randn_like {one}",
            torch.randn_like,
            lambda x, k: normal(k, x, wide(x.dtype)).to(x.dtype),
            ones(6, 5, dtype=one),
            epsilons=most,
        )
        for one, most in ((F32, 1), (F64, 5000), (BF16, 1), (F16, 1))  # XLA's float64 is off by that much
    ),
    *(
        Draw(
            f"exponential_ {one}",
            lambda x: (x * 1).exponential_(2.0),
            lambda x, k: (drawn("exponential", k, (70,)) / 2).to(x.dtype),
            ones(70, dtype=one),
            epsilons=1,
        )
        for one in (BF16, F16)
    ),
    *(
        Draw(
            f"normal of a mean {one}",
            lambda x: torch.normal(x, 0.5),
            lambda x, k: (x + 0.5 * normal(k, x, F32)).to(x.dtype),
            values(9, dtype=one),
            epsilons=1,
        )
        for one in (BF16, F16)
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
    Draw("randperm", lambda x: torch.randperm(17), lambda x, k: drawn("permutation", k, 17, wide=True), ones(1)),
    Draw(
        "multinomial",
        lambda x: torch.multinomial(x, 12, replacement=True),
        lambda x, k: choice(k, x, 12, True),
        torch.tensor([0.1, 3.0, 0.5, 1.0]),
    ),
    *(
        Draw(
            f"multinomial {one}",
            lambda x: torch.multinomial(x, 12, replacement=True),
            lambda x, k: choice(k, x.float(), 12, True),
            torch.tensor([0.1, 3.0, 0.5, 1.0], dtype=one),
        )
        for one in (BF16, F16)
    ),
    Draw(
        "multinomial without replacement",
        lambda x: torch.multinomial(x, 3),
        lambda x, k: choice(k, x, 3, False),
        torch.tensor([0.1, 3.0, 0.5, 1.0]),
    ),
    Draw(
        "multinomial of rows",
        lambda x: torch.multinomial(x, 12, replacement=True),
        lambda x, k: drawn("categorical", k, x.log(), -1, (12, 5), wide=True).T.contiguous(),
        values(5, 4).abs() + 0.1,
    ),
    *(
        Draw(
            f"bernoulli {dtype}",
            torch.bernoulli,
            lambda x, k: drawn("bernoulli", k, x.to(wide(x.dtype)), wide=x.dtype == F64).to(x.dtype),
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
