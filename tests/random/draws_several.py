"""Functions with several draws, and all draws."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.random.draws import Draw, normal, ones, uniform, values
from tests.random.draws_dropout import DROPOUTS, dropped
from tests.random.draws_numbers import FLOATS, INTEGERS


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
