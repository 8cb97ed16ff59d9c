"""Operators as elementwise and matrix operations of torch, which a compiler for CPUs can fuse with what is around them.

The same bits, sums inside a matmul apart. What has no such form here, and what is on a GPU, stays one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from scoped_fn.kernels import _ops as ops
from scoped_fn.kernels._formats import FLOAT32_MAX, FP8_MAX


def _quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, transpose: bool) -> Any:
    if x.device.type != "cpu" or transpose or not x.numel():
        return NotImplemented
    values = x.float()
    return _codes(values, scale[:, :, None], dtype), x.new_empty(len(x), 0, 0, dtype=dtype), _amax(values)


def _quantize_current(x: Tensor, dtype: torch.dtype, power_of_2: bool, epsilon: float, transpose: bool) -> Any:
    if x.device.type != "cpu" or transpose or power_of_2 or not x.numel():
        return NotImplemented
    values = x.float()
    amax = _amax(values)
    least = amax.clamp_min(epsilon)
    usable = (least > 0) & least.isfinite()
    scale = torch.full_like(least, FP8_MAX[dtype]) / torch.where(usable, least, 1.0)
    scale = torch.where(usable, scale.clamp_max(FLOAT32_MAX), 1.0)
    codes = _codes(values, scale[:, None, None], dtype)
    return codes, x.new_empty(len(x), 0, 0, dtype=dtype), amax, scale.reciprocal()


def _amax(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), 0.0, values.abs()).amax((1, 2))


def _codes(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    limit = FP8_MAX[dtype]
    one = values - values + 1  # NaN where a value is not finite: cheaper than a choice
    return ((values * scale).clamp(-limit, limit) * one).to(dtype)


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Any:
    of_rows = scale_a.shape[2] == scale_b.shape[2] == 1 and all(
        scale.shape[1] in (1, data.shape[1]) for scale, data in ((scale_a, a), (scale_b, b))
    )
    fp8 = {a.dtype, b.dtype} <= set(FP8_MAX)
    if a.device.type != "cpu" or out_dtype != torch.float32 or not (of_rows and fp8) or not (a.numel() and b.numel()):
        return NotImplemented
    y = _product(a, b) * scale_a * scale_b.mT
    return y if bias is None else y + bias[:, None].float()


def _product(a: Tensor, b: Tensor) -> Tensor:
    if len(a) == 1 or b.stride(0) == 0:  # one matrix for the whole batch
        return torch.mm(a.flatten(0, 1).float(), b[0].float().mT).view(*a.shape[:2], b.shape[1])
    return torch.bmm(a.float(), b.float().mT)


# Operator -> the same as operations that can be fused, or NotImplemented, for a trace.
FUSIBLE: Final[Mapping[Any, Callable[..., Any]]] = MappingProxyType(
    {ops.quantize: _quantize, ops.quantize_current: _quantize_current, ops.scaled_mm: _scaled_mm}
)
