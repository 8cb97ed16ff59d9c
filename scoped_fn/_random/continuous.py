"""Continuous distributions: floating point numbers from a key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from scoped_fn._errors import SpecError
from scoped_fn._random import floats
from scoped_fn._random.words import SIGNED_OF_WIDTH, bits_of, keys_of, shape_of, words_of
from scoped_fn.kernels._xla_math import fused

ONE = MappingProxyType(  # the bits of 1.0
    {torch.float16: 0x3C00, torch.bfloat16: 0x3F80, torch.float32: 0x3F800000, torch.float64: 0x3FF << 52}
)
REAL = MappingProxyType(
    {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
)


def uniform(
    key: Tensor,
    shape: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    minval: float = 0.0,
    maxval: float = 1.0,
) -> Tensor:
    """Returns numbers that are equally likely anywhere from `minval` up to, not including, `maxval`.

    Args:
        key: uint32 [2].
        shape: Shape of the result.
        dtype: torch.float32, float64, float16 or bfloat16; torch's default dtype if None.
        minval: The least number.
        maxval: The bound.
    """
    shape, dtype = shape_of(shape), _float(dtype)
    info = torch.finfo(dtype)
    width, mantissa = info.bits, round(-math.log2(info.eps))
    drawn = width if mantissa >= 8 else 8
    container = SIGNED_OF_WIDTH[width]
    fraction = (bits_of(words_of(key), shape, drawn) >> (drawn - mantissa)) & ((1 << mantissa) - 1)
    unit = (fraction | ONE[dtype]).to(container).view(dtype) - 1
    return unit if minval == 0.0 and maxval == 1.0 else _ranged(unit, minval, maxval)


def _ranged(unit: Tensor, minval: float, maxval: float) -> Tensor:
    low, high = (torch.full((), value, dtype=unit.dtype, device=unit.device) for value in (minval, maxval))
    span = high - low
    made = fused(unit, span, low) if unit.dtype == torch.float32 else unit * span + low
    return torch.maximum(made, low)


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Returns numbers of the normal distribution with mean 0 and standard deviation 1.

    Args:
        key: uint32 [2].
        shape: Shape of the result.
        dtype: A floating point or complex dtype; torch's default dtype if None.
    """
    if isinstance(dtype, torch.dtype) and dtype.is_complex:
        real, imag = (normal(part, shape, REAL[dtype]) for part in keys_of(words_of(key), 2))
        return torch.complex(real, imag) / 2**0.5
    dtype = _float(dtype)
    least = -1.0 + torch.finfo(dtype).eps / 2
    drawn = uniform(key, shape, dtype, least, 1.0)
    narrow = dtype in (torch.float16, torch.bfloat16)
    found = floats.erf_inv(drawn.float()).to(dtype) if narrow else floats.erf_inv(drawn)
    return found * torch.full((), 2**0.5, dtype=dtype, device=found.device)


def exponential(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Returns numbers of the exponential distribution with mean 1. Arguments are those of `normal`."""
    return -floats.log1p(-uniform(key, shape, dtype))


def gumbel(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Returns numbers of the standard Gumbel distribution. Arguments are those of `normal`."""
    dtype = _float(dtype)
    return -floats.log(-floats.log(uniform(key, shape, dtype, torch.finfo(dtype).tiny, 1.0)))


def cauchy(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Returns numbers of the standard Cauchy distribution. Arguments are those of `normal`."""
    dtype = _float(dtype)
    drawn = uniform(key, shape, dtype, torch.finfo(dtype).eps, 1.0)
    return ((drawn - 0.5) * torch.full((), math.pi, dtype=dtype, device=drawn.device)).tan()


def _float(dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise SpecError(f"Expected float16, bfloat16, float32 or float64, got {dtype}. Draw one of these and convert.")
    return dtype
