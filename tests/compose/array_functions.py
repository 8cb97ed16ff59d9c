"""Cases of array programming: indexing, views, scatter, sorting, scans and linear algebra."""

from __future__ import annotations

import torch

from tests.compose.case import named, numbers

ROWS = torch.tensor([2, 0, 2, 1])
COLUMN = torch.tensor([[1], [0], [1]])


def lookup(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(rows, table).square().sum(-1)


def indexing(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[ROWS, 1:] ** 2, x[..., None, ::2].sin(), x[-1], x.gather(1, ROWS[:3, None]).exp()


def broadcasting(column: torch.Tensor, row: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    return (column * row + one).sin() * column


def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    turned = x.t().unsqueeze(0).expand(2, -1, -1)
    return turned.reshape(-1).square(), x.flatten()[1:5].view(2, 2).mT * 2, x.t(), x.diagonal().flip(0) ** 3


def scattered(x: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, ...]:
    added = x.index_add(0, ROWS, update.square())
    return added, x.scatter(1, COLUMN, update[:3, :1].exp()), x.index_select(0, ROWS[:2]).sin()


def sorting(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, order = x.square().sort(-1, descending=True)
    return values, order, x.topk(2, -1).values ** 3, x.logcumsumexp(0)


def running_sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.square().cumsum(0), x.cumprod(0)


def joined(x: torch.Tensor) -> torch.Tensor:
    halves = torch.stack([x[:2], x[2:]]).unbind(1)
    return torch.cat([halves[1].roll(1), halves[0] * x.prod(), torch.nn.functional.pad(x, (1, 0)).sin()])


def contraction(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,kj->ik", x, y).tril() @ torch.outer(x[:, 0], y[0])


def matrix_trace(x: torch.Tensor) -> torch.Tensor:
    return (x @ x @ x).trace()


def pseudo_inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.pinv(x)


def matrix_exponential(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_exp(x * 0.3)


def solving(matrix: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    spread = matrix @ matrix.mT + 2 * torch.eye(2, dtype=matrix.dtype)
    return torch.linalg.solve(spread, right), spread.logdet()


def solved_by_hand(matrix: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    spread = matrix @ matrix.mT + 2 * torch.eye(2, dtype=matrix.dtype)
    (a, b), (c, d) = spread
    size, (x, y) = a * d - b * c, right
    return torch.stack([d * x - b * y, a * y - c * x]) / size, size.log()


def square() -> tuple[torch.Tensor, ...]:
    return (numbers(3, 3),)


# Found with finite differences on torch 2.13; inv, pinv, qr, cholesky and the like are right.
FACTORS = dict.fromkeys(
    ("jacrev of jacfwd", "jacfwd of jacfwd", "hvp reverse over forward", "jvp of jvp", "vmap of hessian"),
    "the forward rules of solve and logdet take the factors for constants",
)

ARRAY_CASES = (
    named(lookup, lambda: (numbers(3, 2), torch.tensor([[0, 2], [2, 1]]))),
    named(indexing, square),
    named(broadcasting, lambda: (numbers(2, 1), numbers(3, seed=1), numbers(1, 1, seed=2)), 0, 1, 2),
    named(views, square),
    named(scattered, lambda: (numbers(3, 2), numbers(4, 2, seed=1)), 0, 1),
    named(sorting, lambda: (numbers(2, 3),)),
    named(running_sums, lambda: (numbers(3),), deep=True),
    named(joined, lambda: (numbers(4),), deep=True),
    named(contraction, lambda: (numbers(2, 2), numbers(2, 2, seed=1)), 0, 1),
    named(matrix_trace, lambda: (numbers(2, 2),), deep=True),
    named(pseudo_inverse, lambda: (numbers(3, 2),)),
    named(matrix_exponential, lambda: (numbers(2, 2),)),
    named(solving, lambda: (numbers(2, 2), numbers(2, seed=1)), 0, 1, twin=lambda: solved_by_hand, eager_wrong=FACTORS),
)
