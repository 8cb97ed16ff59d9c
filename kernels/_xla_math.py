"""Logarithms and the inverse error function of float32 as XLA computes them on a CPU, bit for bit, in plain torch.

XLA uses fused multiply-adds, which are imitated here in float64: a product of two float32 numbers is exact there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

# log(m) for m from sqrt(1/2) to sqrt(2), from the Cephes library (logf), in three groups that are added with m**3.
LOG: Final = (
    (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1),
    (-1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1),
    (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
SQRT_HALF: Final = 0.707106781186547524
LN2_LOW, LN2_HIGH = -2.12194440e-4, 0.693359375
# log(1 + x) for |x| up to sqrt(2) - 1, from the Cephes library (log1p).
LOG1P: Final = (
    4.5270000862445199635215e-5, 4.9854102823193375972212e-1, 6.5787325942061044846969, 2.9911919328553073277375e1,
    6.0949667980987787057556e1, 5.7112963590585538103336e1, 2.0039553499201281259648e1,
)  # fmt: skip
LOG1P_BELOW: Final = (
    1.0, 1.5062909083469192043167e1, 8.3047565967967209469434e1, 2.2176239823732856465394e2,
    3.0909872225312059774938e2, 2.1642788614495947685003e2, 6.0118660497603843919306e1,
)  # fmt: skip
LOG1P_LIMIT: Final = 2**0.5 - 1
# The inverse error function: M. Giles, "Approximating the erfinv function", GPU Computing Gems, 2010.
NEAR: Final = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
FAR: Final = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def single(value: float) -> float:
    """Returns the float32 number nearest to one."""
    if value == 0 or not math.isfinite(value):
        return value
    exponent = max(math.frexp(value)[1], -125)
    return math.ldexp(round(math.ldexp(value, 24 - exponent)), exponent - 24)


def fused(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """Returns `a * b + c` of float32 tensors and numbers, rounded once."""
    return (a.double() * _double(b) + _double(c)).float()


def _double(value: Tensor | float) -> Tensor | float:
    return value.double() if isinstance(value, Tensor) else single(value)


def log(x: Tensor) -> Tensor:
    """Returns the natural logarithm of 0 or normal numbers; -inf of 0."""
    pattern = x.view(torch.int32)
    exponent = ((pattern >> 23) - 126).float()
    m = ((pattern & 0x7FFFFF) | 0x3F000000).view(torch.float32)
    small = m < SQRT_HALF
    exponent, m = exponent - small.float(), (m - 1) + torch.where(small, m, 0.0)
    square = m * m
    cube = square * m
    first, second, third = (_horner(m, group) for group in LOG)
    tail = fused(fused(first, cube, second), cube, third)
    tail = fused(tail, cube, exponent * LN2_LOW)
    value = fused(exponent, LN2_HIGH, fused(square, -0.5, m) + tail)
    return torch.where(x == 0, -torch.inf, value)


def log1p(x: Tensor) -> Tensor:
    """Returns log(1 + x) of numbers from -1 to 0."""
    square = x * x
    ratio = _horner(x, LOG1P) / _horner(x, LOG1P_BELOW)
    near = x + fused(square, -0.5, x * square * ratio)
    return torch.where(x.abs() < LOG1P_LIMIT, near, log(1 + x))


def erf_inv(x: Tensor) -> Tensor:
    """Returns the inverse error function of numbers between -1 and 1."""
    w = -log1p(-x * x)
    near = w < 5
    w = torch.where(near, w - 2.5, w.double().sqrt().float() - 3)  # torch's own root in float32 is not rounded rightly
    first, *others = (torch.where(near, a, b).float() for a, b in zip(NEAR, FAR, strict=True))
    value = first
    for coefficient in others:
        value = fused(value, w, coefficient)
    return value * x


def _horner(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    value: Tensor | float = coefficients[0]
    for coefficient in coefficients[1:]:
        value = fused(x, value, coefficient)
    return value  # type: ignore[return-value]
