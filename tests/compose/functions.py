"""The cases of the matrix: what PyTorch code does, each in a few lines and with a few numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.compose.array_functions import ARRAY_CASES
from tests.compose.case import FORWARD_RULE, WRITES_BATCH, Case, named, numbers
from tests.compose.custom import ForwardSurrogate, Surrogate
from tests.compose.modules import MODULE_CASES

HELD = numbers(3, seed=40)


def complex_inside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    turned = torch.exp(1j * x) * torch.complex(x, x.cos())
    return turned.abs().square(), turned


def complex_argument(z: torch.Tensor) -> torch.Tensor:
    return (z * z.conj()).real + (z**2).imag


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[0] = x[1] ** 2
    y.mul_(x.sin())
    y[1:].add_(1)
    return y * x


def in_place_into_new(x: torch.Tensor) -> torch.Tensor:
    rows = torch.zeros(2, 3, dtype=x.dtype)
    rows[0] = x.sin()
    rows[1, 1:] += x[:2] ** 2
    return rows


def out_of_place(x: torch.Tensor) -> torch.Tensor:
    y = torch.cat([x[1:2] ** 2, x[1:] * 2]) * x.sin()
    return torch.cat([y[:1], y[1:] + 1]) * x


def stacked_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.sin(), torch.cat([torch.zeros_like(x[:1]), x[:2] ** 2])])


def loop(weight: torch.Tensor, xs: torch.Tensor) -> dict[str, Any]:
    hidden, seen = torch.zeros(2, dtype=xs.dtype), []
    for x in xs:
        hidden = torch.tanh(weight @ hidden + x)
        seen.append(hidden.sum())
    return {"last": hidden, "seen": seen}


def surrogate(x: torch.Tensor) -> torch.Tensor:
    return Surrogate.apply(x * 2) * x + x.sin()


def forward_surrogate(x: torch.Tensor) -> torch.Tensor:
    return ForwardSurrogate.apply(x * 2) * x + x.sin()


def outputs(x: torch.Tensor) -> dict[str, Any]:
    return {"wave": (x.sin(), [x.cos()]), "norm": x.square().sum(), "first": x[0]}


def unused(x: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    return x.exp()


def detached(x: torch.Tensor) -> torch.Tensor:
    return x * x.detach().sin() + x**3


def no_grad_inside(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        frozen = x.square()
    return frozen * x.sin()


def kinks(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    chosen = torch.where(x > y, x * y, y**2)
    return chosen, torch.maximum(x, y), x.relu(), x.abs(), x.amax(), x.clamp(-1, 1)


def dict_input(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    low, (high, scale) = batch["low"], batch["pair"]
    return {"mixed": low * high + scale, "scale": scale.exp()}


def number_arguments(x: torch.Tensor, power: int, shift: float) -> torch.Tensor:
    return (x + shift) ** power


def float32_weights(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(weight.double() @ x)


def closed_over(x: torch.Tensor) -> torch.Tensor:
    return (x * HELD).sin() + torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * x**2


def gradient_inside(x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda y: (y**4).sum())(x) * x.sin()


def empty_batch(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x @ weight).tanh(), (x @ weight).sum()


def softmax_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels)


def vector() -> tuple[torch.Tensor, ...]:
    return (numbers(3),)


def kink_points() -> tuple[torch.Tensor, ...]:
    x = torch.tensor([0.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    return x, torch.tensor([0.5, 1.0, -1.0, 0.0], dtype=torch.float64)


def batch() -> tuple[Any, ...]:
    return ({"low": numbers(3), "pair": (numbers(3, seed=1), numbers(1, seed=2))},)


JACOBIANS = ("jacrev", "jacrev in chunks", "jacfwd")
ALL_JACOBIANS = (*JACOBIANS, "jacrev of jacrev", "jacrev of jacfwd", "jacfwd of jacfwd", "hessian",
                 "hessian of the last argument", "vmap of hessian")  # fmt: skip

PLAIN_CASES = (
    named(complex_inside, vector, eager_cannot=dict.fromkeys(JACOBIANS, "jacrev and jacfwd want real results")),
    named(
        complex_argument,
        lambda: (torch.complex(numbers(3), numbers(3, seed=1)),),
        eager_cannot=dict.fromkeys(ALL_JACOBIANS, "jacrev and jacfwd want real arguments"),
    ),
    named(
        in_place,
        vector,
        deep=True,
        twin=lambda: out_of_place,
        eager_wrong={"linearize": "the linear graph loses what is written in place"},
        eager_cannot={"jacfwd of jacfwd": "an in-place write meets forward mode's immutable zero tensor"},
    ),
    named(in_place_into_new, vector, twin=lambda: stacked_rows, eager_cannot={"batched": WRITES_BATCH}),
    named(loop, lambda: (numbers(2, 2), numbers(3, 2, seed=1)), 0, 1),
    named(surrogate, vector, twin=lambda: forward_surrogate, eager_cannot={"forward": FORWARD_RULE}),
    named(outputs, vector, deep=True),
    named(unused, lambda: (numbers(3), numbers(2, seed=1)), 0, 1),
    named(detached, vector),
    named(no_grad_inside, vector),
    named(kinks, kink_points, 0, 1),
    named(dict_input, batch),
    named(number_arguments, lambda: (numbers(3), 3, 0.5), deep=True),
    named(float32_weights, lambda: (numbers(2, 3, dtype=torch.float32), numbers(3, seed=1)), 0, 1, rtol=1e-5),
    named(closed_over, vector, deep=True),
    named(gradient_inside, vector, deep=True),
    named(
        empty_batch,
        lambda: (numbers(3, 2), numbers(0, 3)),
        0,
        1,
        eager_cannot={"hessian of the last argument": "jacfwd of an argument without elements has no column"},
    ),
    named(softmax_loss, lambda: (numbers(3, 4), torch.tensor([0, 2, 1])), 0),
)

CASES: tuple[Case, ...] = (*MODULE_CASES, *ARRAY_CASES, *PLAIN_CASES)
