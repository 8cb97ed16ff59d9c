"""Derivatives by scales and bias. FP8 data has none: its gradient would be rounded to FP8 (1234 to 448)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from scoped_fn.kernels._formats import block_shape
from scoped_fn.kernels._opaque_op import Derivative

Gradients = tuple[Tensor | None, ...]


def _dequantize_backward(arguments: tuple[Any, ...], needed: tuple[bool, ...], cotangent: Tensor) -> Gradients:
    data, scale_inv, _ = arguments
    _refuse_data(needed[0])
    return None, _sum_blocks(cotangent.float() * data.float(), data, scale_inv), None


def _dequantize_jvp(arguments: tuple[Any, ...], tangents: tuple[Tensor | None, ...]) -> Tensor:
    data, _, dtype = arguments
    data_tangent, scale_tangent, _ = tangents
    _refuse_data(data_tangent is not None)
    assert scale_tangent is not None
    tangent: Tensor = _dequantize(data, scale_tangent, dtype)
    return tangent


def _scaled_mm_backward(arguments: tuple[Any, ...], needed: tuple[bool, ...], cotangent: Tensor) -> Gradients:
    a, b, scale_a, scale_b, bias = arguments[:5]
    _refuse_data(needed[0] or needed[1])
    g = cotangent.float()
    for_a = _sum_blocks(_product(g, _dequantize(b, scale_b)) * a.float(), a, scale_a) if needed[2] else None
    for_b = _sum_blocks(_product(g.mT, _dequantize(a, scale_a)) * b.float(), b, scale_b) if needed[3] else None
    return None, None, for_a, for_b, g.sum(1).to(bias.dtype) if needed[4] else None, None, None


def _scaled_mm_jvp(arguments: tuple[Any, ...], tangents: tuple[Tensor | None, ...]) -> Tensor:
    a, b, scale_a, scale_b, _, out_dtype, _ = arguments
    for_data = tangents[:2]
    for_a, for_b, for_bias = tangents[2:5]
    _refuse_data(any(tangent is not None for tangent in for_data))
    # Linear in each of the three.
    y = torch.zeros((), device=a.device).expand(*a.shape[:2], b.shape[1])
    if for_a is not None:
        y = y + _product(_dequantize(a, for_a), _dequantize(b, scale_b).mT)
    if for_b is not None:
        y = y + _product(_dequantize(a, scale_a), _dequantize(b, for_b).mT)
    return (y if for_bias is None else y + for_bias[:, None].float()).to(out_dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b, in float64, which autocast leaves alone: to switch it off has no effect inside torch.func."""
    return (a.double() @ b.double()).float()


def _refuse_data(wanted: bool) -> None:
    if wanted:
        raise RuntimeError(
            "Expected no derivative with respect to FP8 data, got one, which would be rounded to FP8. "
            "Multiply inside a torch.autograd.Function with a rule of its own (docs/kernels.md), or detach x before it "
            "is quantized, if no gradient should flow."
        )


def _dequantize(data: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    return torch.ops.scoped_fn.dequantize.default(data, scale_inv, dtype)


def _sum_blocks(x: Tensor, data: Tensor, scale_inv: Tensor) -> Tensor:
    """Returns the sum over the elements (B, M, K) that share each scale (B, R, C)."""
    if x.numel() == 0:
        return torch.zeros_like(scale_inv)
    rows, columns = block_shape(data, scale_inv)
    x = pad(x, (0, -x.shape[2] % columns, 0, -x.shape[1] % rows))
    batch, m, k = x.shape
    return x.reshape(batch, m // rows, rows, k // columns, columns).sum((2, 4))


DEQUANTIZE = Derivative(backward=_dequantize_backward, jvp=_dequantize_jvp)
SCALED_MM = Derivative(backward=_scaled_mm_backward, jvp=_scaled_mm_jvp)
