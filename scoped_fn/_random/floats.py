"""Logarithms and the inverse error function: XLA's in float32, so that draws are JAX's bit for bit, else torch's."""

from __future__ import annotations

import torch
from torch import Tensor

from scoped_fn.kernels import xla_erf_inv, xla_log, xla_log1p


def log(x: Tensor) -> Tensor:
    """Returns the natural logarithm of 0 or normal numbers; -inf of 0."""
    return xla_log(x) if x.dtype == torch.float32 else torch.log(x)


def log1p(x: Tensor) -> Tensor:
    """Returns log(1 + x) of numbers from -1 to 0."""
    return xla_log1p(x) if x.dtype == torch.float32 else torch.log1p(x)


def erf_inv(x: Tensor) -> Tensor:
    """Returns the inverse error function of numbers between -1 and 1."""
    return xla_erf_inv(x) if x.dtype == torch.float32 else torch.erfinv(x)
