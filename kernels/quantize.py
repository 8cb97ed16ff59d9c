"""Quantization to FP8, and back. One direction of scale: ``data = saturate(x * scale)``, ``x ~ data * scale_inv``."""

from __future__ import annotations

import torch
from torch import Tensor

from scoped_fn.kernels import _ops as ops
from scoped_fn.kernels._checks import (
    FLOATS,
    as_matrix,
    check_choice,
    check_float32,
    check_fp8,
    check_layout,
    check_not_negative,
    check_quantized,
    check_same_device,
)
from scoped_fn.kernels._formats import BLOCK, as_rows
from scoped_fn.kernels.nvfp4 import dequantize_nvfp4
from scoped_fn.kernels.quantized import Quantized


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, *, transpose: bool = False) -> Quantized:
    """Returns x times a given scale in FP8, and the amax of x from the same read.

    Rounds to nearest, ties to even. What is finite saturates at the largest finite code (448 or 57344); NaN and
    infinities become NaN, so that a poisoned step shows.

    Args:
        x: (..., K), float32, bfloat16 or float16; the matrix (M, K) with M the product of the leading sizes.
        scale: float32, () for the tensor or (M, 1) for each row. Delayed scaling has it from `update_scales`.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        transpose: Whether to give the transposed copy too, which matmuls along M need.

    Returns:
        Data in the shape of x, with amax () and scale_inv = 1 / scale. Not differentiable: a derivative that reaches
        the data raises RuntimeError; amax is a statistic and carries none.

    Raises:
        TypeError: x, scale or dtype is of another type.
        ValueError: scale has another shape, or lies on another device.

    Example:
        >>> q = quantize(torch.tensor([0.5, -3.0, 1e9]), torch.tensor(2.0), torch.float8_e4m3fn)
        >>> q.data.float().tolist(), q.amax.item(), q.scale_inv.item()
        ([1.0, -6.0, 448.0], 1000000000.0, 0.5)
    """
    matrix = as_matrix(x)
    check_fp8(dtype)
    check_float32(scale, "scale", (), (matrix.shape[1], 1))
    check_same_device(x, scale=scale)
    data, data_t, amax = ops.quantize(matrix, scale.reshape(1, -1), dtype, transpose)
    return _per_tensor(x, data, data_t if transpose else None, amax, scale.reciprocal())


def quantize_current(
    x: Tensor, dtype: torch.dtype, *, power_of_2: bool = False, epsilon: float = 0.0, transpose: bool = False
) -> Quantized:
    """Returns x in FP8 with the scale that its own amax asks for (current scaling).

    ``scale = FP8_MAX / max(amax, epsilon)``, rounded to nearest; 1 if that amax is 0 or not finite; the largest float32
    where the quotient overflows; rounded down to a power of two on request.

    Args:
        x: (..., K), float32, bfloat16 or float16.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        power_of_2: Whether to clear the mantissa of the scale.
        epsilon: The least amax to reckon with.
        transpose: Whether to give the transposed copy too.

    Returns:
        Data in the shape of x, amax () and scale_inv (). Not differentiable, see `quantize`.

    Raises:
        TypeError: x or dtype is of another type.
        ValueError: epsilon is negative.

    Example:
        >>> q = quantize_current(torch.tensor([1.0, -3.5]), torch.float8_e4m3fn)
        >>> q.data.float().tolist(), dequantize(q).tolist()
        ([128.0, -448.0], [1.0, -3.5])
    """
    matrix = as_matrix(x)
    check_fp8(dtype)
    check_not_negative(epsilon, "epsilon")
    data, data_t, amax, scale_inv = ops.quantize_current(matrix, dtype, power_of_2, epsilon, transpose)
    return _per_tensor(x, data, data_t if transpose else None, amax, scale_inv[0])


def quantize_blocks(
    x: Tensor,
    dtype: torch.dtype,
    *,
    block_rows: int = 1,
    power_of_2: bool = True,
    epsilon: float = 0.0,
    transpose: bool = False,
) -> Quantized:
    """Returns x in FP8 with a scale for each block of 1 x 128 or 128 x 128 elements.

    The scale of a block follows `quantize_current`, except that a quotient which overflows becomes the largest finite
    number of x's dtype. Ragged blocks at the edges are padded with zeros, which changes no scale.

    Args:
        x: (..., K), float32, bfloat16 or float16; the matrix (M, K) with M the product of the leading sizes.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block_rows: 1 (activations, gradients) or 128 (weights).
        power_of_2: Whether scales are rounded down to powers of two.
        epsilon: The least amax to reckon with.
        transpose: Whether to give the transposed matrix too: for 1 x 128 quantized from x in blocks along M, for
            128 x 128 a copy.

    Returns:
        Data in the shape of x, scale_inv (ceil(M / block_rows), ceil(K / 128)) float32, amax None. Not differentiable,
        see `quantize`.

    Raises:
        TypeError: x or dtype is of another type.
        ValueError: block_rows or epsilon is another number.

    Example:
        >>> q = quantize_blocks(torch.randn(300, 200), torch.float8_e4m3fn, block_rows=128)
        >>> tuple(q.data.shape), tuple(q.scale_inv.shape)
        ((300, 200), (3, 2))
    """
    matrix = as_matrix(x)
    check_fp8(dtype)
    check_choice(block_rows, "block_rows", (1, BLOCK))
    check_not_negative(epsilon, "epsilon")
    data, scale_inv, data_t, scale_inv_t = ops.quantize_blocks(
        matrix, dtype, block_rows, power_of_2, epsilon, transpose
    )
    # Stored with the blocks along K first, as a matmul reads them; seen as (M / block_rows, K / 128).
    scale_inv = scale_inv[0].mT
    if not transpose:
        return Quantized(data.reshape(x.shape), None, None, scale_inv, None)
    scale_inv_t = scale_inv_t[0].mT if block_rows == 1 else scale_inv.mT
    return Quantized(data.reshape(x.shape), data_t[0], None, scale_inv, scale_inv_t)


def quantize_mx(x: Tensor, dtype: torch.dtype, *, transpose: bool = False) -> Quantized:
    """Returns x in MXFP8: FP8 with a power-of-two scale for each 32 elements of a row.

    The scale of a block is the smallest power of two that is at least amax / FP8_MAX (rounded up), as an E8M0 byte:
    ``x ~ data * 2 ** (byte - 127)``; 254 where amax is infinite.

    Args:
        x: (..., K), float32, bfloat16 or float16; the matrix (M, K) with M the product of the leading sizes.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        transpose: Whether to give the transposed matrix too, quantized from x in blocks of 32 along M.

    Returns:
        Data in the shape of x, scale_inv (M, ceil(K / 32)) uint8, amax None. Not differentiable, see `quantize`.

    Raises:
        TypeError: x or dtype is of another type.

    Example:
        >>> q = quantize_mx(torch.full((1, 32), 449.0), torch.float8_e4m3fn)
        >>> q.scale_inv.item() - 127, q.data[0, 0].item()
        (1, 224.0)
    """
    matrix = as_matrix(x)
    check_fp8(dtype)
    data, scale_inv, data_t, scale_inv_t = ops.quantize_mx(matrix, dtype, transpose)
    if not transpose:
        return Quantized(data.reshape(x.shape), None, None, scale_inv[0], None)
    return Quantized(data.reshape(x.shape), data_t[0], None, scale_inv[0], scale_inv_t[0])


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns ``data * scale_inv``, computed in float32 and rounded to a dtype.

    Args:
        quantized: Of any layout.
        dtype: torch.float32, torch.bfloat16 or torch.float16.

    Returns:
        A tensor in the shape of the data. Differentiable with respect to float32 scales; the data has no derivative.

    Raises:
        TypeError: The data, the scales or dtype is of another type.
        ValueError: The scales do not fit the data.
    """
    check_choice(dtype, "dtype", FLOATS)
    check_quantized(quantized, "quantized")
    if quantized.data.dtype == torch.uint8:
        return dequantize_nvfp4(quantized, dtype)
    matrix = as_rows(quantized.data)
    scales = check_layout(matrix, quantized.scale_inv, "quantized")
    x: Tensor = ops.dequantize(matrix[None], scales[None], dtype)
    return x.reshape(quantized.data.shape)


def _per_tensor(x: Tensor, data: Tensor, data_t: Tensor | None, amax: Tensor, scale_inv: Tensor) -> Quantized:
    data = data.reshape(x.shape)
    if data_t is None:
        return Quantized(data, None, amax[0], scale_inv, None)
    return Quantized(data, data_t[0], amax[0], scale_inv, scale_inv.mT if scale_inv.dim() == 2 else scale_inv.view(()))
