"""Numbers of compiled functions have the mean and the variance of their distribution, within five sigma."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.random.models import compiled

COUNT = 200_000


@dataclass(frozen=True)
class Moments:
    """Mean, variance, and fourth central moment, which says how far off the variance of a sample may be."""

    draw: Callable[[Tensor], Tensor]
    mean: float
    variance: float
    fourth: float


def of_two(p: float, low: float, high: float) -> tuple[float, float, float]:
    """The moments of a number that is high with probability p, else low."""
    mean, span = low + p * (high - low), high - low
    return mean, p * (1 - p) * span**2, span**4 * (p * (1 - p) ** 4 + (1 - p) * p**4)


def of_range(low: int, high: int) -> tuple[float, float, float]:
    """The moments of an integer."""
    values = torch.arange(low, high, dtype=torch.float64)
    away = values - values.mean()
    return values.mean().item(), (away**2).mean().item(), (away**4).mean().item()


DISTRIBUTIONS = {
    "uniform": Moments(torch.rand_like, 1 / 2, 1 / 12, 1 / 80),
    "uniform_": Moments(lambda x: (x * 1).uniform_(-3, 1), -1, 16 / 12, 256 / 80),
    "normal": Moments(torch.randn_like, 0, 1, 3),
    "normal_": Moments(lambda x: (x * 1).normal_(2, 3), 2, 9, 243),
    "exponential": Moments(lambda x: (x * 1).exponential_(2.0), 1 / 2, 1 / 4, 9 / 16),
    "bernoulli": Moments(lambda x: torch.bernoulli(x, 0.2), *of_two(0.2, 0, 1)),
    "dropout": Moments(lambda x: F.dropout(x, 0.3), *of_two(0.7, 0, 1 / 0.7)),
    "randint": Moments(lambda x: torch.randint(-2, 9, x.shape), *of_range(-2, 9)),
    "multinomial": Moments(
        lambda x: torch.multinomial(torch.tensor([3.0, 1.0]), COUNT, replacement=True), *of_two(0.25, 0, 1)
    ),
    "geometric": Moments(lambda x: (x * 1).geometric_(0.5), 2, 2, 26),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("seed", [0, 123])
def test_moments(name: str, seed: int) -> None:
    expected, x = DISTRIBUTIONS[name], torch.ones(COUNT)
    state, fn = compiled(expected.draw, x, seed=seed)
    numbers = fn(state, x)[1].double()
    mean_off = (numbers.mean() - expected.mean) / (expected.variance / COUNT) ** 0.5
    variance_off = (numbers.var() - expected.variance) / ((expected.fourth - expected.variance**2) / COUNT) ** 0.5
    assert abs(mean_off) < 5
    assert abs(variance_off) < 5 or expected.fourth == expected.variance**2


RARE: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "bernoulli": (lambda x: torch.bernoulli(x * 0 + 0.001).float().mean(), 0.0006, 0.0014),
    "bernoulli_": (lambda x: (x * 1).bernoulli_(x * 0 + 0.001).float().mean(), 0.0006, 0.0014),
    "multinomial": (lambda x: torch.multinomial(x[:20_000].expand(20, 20_000), 5).float().mean(), 7_000, 13_000),
    "gumbel_softmax": (
        lambda x: F.gumbel_softmax(x[:COUNT].view(200, 1000), hard=True).argmax(-1).float().mean(),
        400,
        600,
    ),
    "normal": (lambda x: torch.randn_like(x).float().abs().max(), 4.0, 6.0),
    "normal_": (lambda x: (x * 1).normal_().float().abs().max(), 4.0, 6.0),
    "exponential": (lambda x: (x * 1).exponential_().float().max(), 10.0, 20.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RARE)
def test_tails_and_rare_events_are_there_in_16_bits_too(name: str, dtype: torch.dtype) -> None:
    draw, least, most = RARE[name]
    x = torch.ones(COUNT, dtype=dtype)
    state, fn = compiled(draw, x)
    for value in (fn(state, x)[1], draw(x)):
        assert least <= float(value) <= most


def test_numbers_of_two_sites_two_calls_and_neighbours_do_not_correlate() -> None:
    state, fn = compiled(lambda x: (torch.randn_like(x), torch.randn_like(x)), torch.ones(COUNT))
    state, (one, other) = fn(state, torch.ones(COUNT))
    _, (later, _) = fn(state, torch.ones(COUNT))
    for left, right in ((one, other), (one, later), (other, later), (one[1:], one[:-1])):
        assert abs((left * right).mean()) < 5 / COUNT**0.5


def test_every_order_of_three_comes_up_as_often() -> None:
    state, fn = compiled(lambda x: torch.stack([torch.randperm(3) for _ in range(100)]), torch.ones(1))
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(30):
        state, orders = fn(state, torch.ones(1))
        for order in orders.tolist():
            counts[tuple(order)] = counts.get(tuple(order), 0) + 1
    assert len(counts) == 6
    assert all(abs(count - 500) < 5 * (3000 * 5 / 36) ** 0.5 for count in counts.values())
