"""Functions that draw, and what they must give: written with JAX's functions, from the key of each draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.random.oracle import drawn

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


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of 16 bits are drawn before they are rounded."""
    return F32 if dtype in (BF16, F16) else dtype


def uniform(key: Tensor, x: Any, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Uniform numbers of a tensor's shape and dtype, or of a shape."""
    shape, dtype = (tuple(x.shape), dtype or x.dtype) if isinstance(x, Tensor) else (x, dtype or F32)
    return drawn("uniform", key, shape, dtype=dtype, minval=low, maxval=high, one_by_one=dtype == F64)


def normal(key: Tensor, x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Normal numbers of a tensor's shape and dtype, or of a shape."""
    shape, dtype = (tuple(x.shape), dtype or x.dtype) if isinstance(x, Tensor) else (x, dtype or F32)
    return drawn("normal", key, shape, dtype=dtype)
