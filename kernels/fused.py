"""What comes before a quantization, fused with it: one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scoped_fn.kernels import _ops as ops
from scoped_fn.kernels._checks import (
    as_matrix,
    check_float32,
    check_fp8,
    check_not_negative,
    check_same_device,
    check_vector,
)
from scoped_fn.kernels.quantized import Quantized


def rms_norm_quantize(
    x: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, *, eps: float = 1e-6, transpose: bool = False
) -> tuple[Quantized, Tensor]:
    """Returns RMSNorm of x in FP8, and what its backward needs.

    ``y = x * rstd * weight`` with ``rstd = 1 / sqrt(mean(x ** 2) + eps)``, in float32; y goes to FP8 without a rounding
    to x's dtype in between.

    Args:
        x: (..., K), float32, bfloat16 or float16.
        weight: (K,), of the same dtypes.
        scale: float32 (), of y.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        eps: Added to the mean square.
        transpose: Whether to give the transposed copy too.

    Returns:
        The quantized y, with the amax of y, and rstd (...) float32. Not differentiable, see `quantize`.

    Raises:
        TypeError: An argument is of another type.
        ValueError: Sizes or devices do not fit each other.
    """
    matrix = _checked(x, scale, dtype, eps, weight=weight)
    *quantized, rstd = ops.rms_norm_quantize(matrix, weight[None], scale.reshape(1), eps, dtype, transpose)
    return _quantized(x, scale, transpose, *quantized), rstd.reshape(x.shape[:-1])


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    eps: float = 1e-5,
    transpose: bool = False,
) -> tuple[Quantized, Tensor, Tensor]:
    """Returns LayerNorm of x in FP8, and what its backward needs.

    ``y = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(variance + eps)`` and the biased variance, in
    float32; y goes to FP8 without a rounding to x's dtype in between.

    Args:
        x: (..., K), float32, bfloat16 or float16.
        weight: (K,), of the same dtypes.
        bias: (K,), of the same dtypes.
        scale: float32 (), of y.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        eps: Added to the variance.
        transpose: Whether to give the transposed copy too.

    Returns:
        The quantized y, with the amax of y, then mean and rstd (...), float32. Not differentiable, see `quantize`.

    Raises:
        TypeError: An argument is of another type.
        ValueError: Sizes or devices do not fit each other.
    """
    matrix = _checked(x, scale, dtype, eps, weight=weight, bias=bias)
    *quantized, mean, rstd = ops.layer_norm_quantize(
        matrix, weight[None], bias[None], scale.reshape(1), eps, dtype, transpose
    )
    rows = x.shape[:-1]
    return _quantized(x, scale, transpose, *quantized), mean.reshape(rows), rstd.reshape(rows)


def silu_gate_quantize(
    gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype, *, transpose: bool = False
) -> Quantized:
    """Returns ``silu(gate) * up`` in FP8, computed in float32: the activation of a gated feed-forward layer.

    Args:
        gate: (..., K), float32, bfloat16 or float16; silu(x) = x / (1 + exp(-x)).
        up: In the shape of gate, of the same dtypes.
        scale: float32 (), of the product.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        transpose: Whether to give the transposed copy too.

    Returns:
        The quantized product, with its amax. Not differentiable, see `quantize`.

    Raises:
        TypeError: An argument is of another type.
        ValueError: Sizes or devices do not fit each other.
    """
    matrix = _checked(gate, scale, dtype, 0.0, "gate")
    if up.shape != gate.shape:
        raise ValueError(f"Expected up of shape {tuple(gate.shape)}, as gate, got {tuple(up.shape)}. Make them equal.")
    check_same_device(gate, up=up)
    quantized = ops.silu_gate_quantize(matrix, as_matrix(up, "up"), scale.reshape(1), dtype, transpose)
    return _quantized(gate, scale, transpose, *quantized)


def _checked(x: Tensor, scale: Tensor, dtype: torch.dtype, eps: float, name: str = "x", /, **vectors: Tensor) -> Tensor:
    matrix = as_matrix(x, name)
    check_fp8(dtype)
    check_float32(scale, "scale", ())
    check_not_negative(eps, "eps")
    for vector_name, vector in vectors.items():
        check_vector(vector, vector_name, matrix.shape[2])
    check_same_device(x, scale=scale, **vectors)
    return matrix


def _quantized(x: Tensor, scale: Tensor, transpose: bool, data: Tensor, data_t: Tensor, amax: Tensor) -> Quantized:
    scale_inv = scale.reciprocal()
    of_transposed: Any = (data_t[0], scale_inv.view(())) if transpose else (None, None)
    return Quantized(data.reshape(x.shape), of_transposed[0], amax[0], scale_inv, of_transposed[1])
