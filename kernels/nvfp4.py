"""NVFP4: E2M1 codes with an E4M3 scale for each 16 elements and one float32 scale for the tensor.

In plain torch on every device: the reference path. Codes are one a byte, not packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scoped_fn.kernels import _ops as ops
from scoped_fn.kernels._checks import as_matrix, check_choice, check_float32, check_layout, check_same_device
from scoped_fn.kernels._formats import NVFP4_BLOCK, as_rows
from scoped_fn.kernels.quantized import Quantized


def quantize_nvfp4(
    x: Tensor, *, block_rows: int = 1, noise: Tensor | None = None, transpose: bool = False
) -> Quantized:
    """Returns x in NVFP4.

    With ``s = 448 * 6 / amax`` (1 if amax is 0 or not finite, at most the largest float32), a block's scale is
    ``d = saturate_e4m3(block_amax * (s / 6))`` and its codes are ``round_e2m1(x * min(1 / (d * (1 / s)), FLT_MAX))``,
    saturated at 6. Then ``x ~ code * d / s``.

    Args:
        x: (..., K), float32, bfloat16 or float16; the matrix (M, K) with M the product of the leading sizes.
        block_rows: 1 for blocks of 1 x 16 (activations, gradients), 16 for 16 x 16 (weights).
        noise: Uniform numbers in [0, 1), float32, in the shape of x, for stochastic rounding; None rounds to nearest,
            ties to even.
        transpose: Whether to give the transposed matrix too: for 1 x 16 quantized from x in blocks along M.

    Returns:
        Data in the shape of x, uint8: 8 for the sign, plus 0 to 7 for 0, 0.5, 1, 1.5, 2, 3, 4, 6. amax () of x.
        scale_inv (ceil(M / block_rows), ceil(K / 16)), float8_e4m3fn. E2M1 has no NaN: where a block has an element
        that is not finite, its scale is NaN, so that a poisoned step shows. Not differentiable, see `quantize`.

    Raises:
        TypeError: x or noise is of another type.
        ValueError: block_rows is another number, or noise has another shape.

    Example:
        >>> from scoped_fn.kernels import dequantize
        >>> q = quantize_nvfp4(torch.tensor([6.0, -3.0, 0.5, 0.1]))
        >>> q.data.tolist(), q.scale_inv.item(), dequantize(q).tolist()
        ([7, 13, 1, 0], 448.0, [6.0, -3.0, 0.5, 0.0])
    """
    matrix = as_matrix(x)
    check_choice(block_rows, "block_rows", (1, NVFP4_BLOCK))
    if noise is not None:
        check_float32(noise, "noise", tuple(x.shape))
        check_same_device(x, noise=noise)
    noise = None if noise is None else as_rows(noise)[None]
    data, scale_inv, data_t, scale_inv_t, amax = ops.quantize_nvfp4(matrix, block_rows, noise, transpose)
    data = data.reshape(x.shape)
    if not transpose:
        return Quantized(data, None, amax[0], scale_inv[0], None)
    return Quantized(data, data_t[0], amax[0], scale_inv[0], scale_inv_t[0])


def dequantize_nvfp4(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns ``code * scale_inv / s`` of NVFP4 data in its shape; s follows from amax, as in `quantize_nvfp4`."""
    matrix = as_rows(quantized.data)
    scales = check_layout(matrix, quantized.scale_inv, "quantized")
    if quantized.amax is None or quantized.amax.numel() != 1:
        raise ValueError(f"Expected quantized with the amax of its tensor, got {quantized.amax}. Keep all its fields.")
    amax = quantized.amax.reshape(1)
    x: Tensor = ops.dequantize_nvfp4(matrix[None], scales[None], amax, dtype)
    return x.reshape(quantized.data.shape)


def hadamard_16(x: Tensor, signs: Tensor) -> Tensor:
    """Returns x with each 16 elements of its rows multiplied by signs, then by the 16 x 16 Hadamard matrix / 4.

    Spreads outliers over a block. The matrix is orthogonal, so a product of two matrices that are both transformed
    along the dimension that is summed over stays what it was.

    Args:
        x: (..., K) with K a multiple of 16.
        signs: (16,), of 1 and -1, in the dtype of x.

    Returns:
        A tensor in the shape and dtype of x. Differentiable.

    Raises:
        ValueError: K is no multiple of 16, or signs has another shape.

    Example:
        >>> hadamard_16(torch.eye(16)[0], torch.ones(16)).tolist() == [0.25] * 16
        True
    """
    if x.dim() == 0 or x.shape[-1] % NVFP4_BLOCK or tuple(signs.shape) != (NVFP4_BLOCK,):
        raise ValueError(
            f"Expected x (..., K) with K a multiple of 16, and signs (16,), got {tuple(x.shape)} and "
            f"{tuple(signs.shape)}. Pad x with zeros."
        )
    columns = x.shape[-1]
    x = x.reshape(*x.shape[:-1], columns // NVFP4_BLOCK, NVFP4_BLOCK) * signs
    shape = x.shape
    for half in (1, 2, 4, 8):
        x = x.reshape(*shape[:-1], NVFP4_BLOCK // (2 * half), 2, half)
        first, second = x.unbind(-2)
        x = torch.stack([first + second, first - second], -2)
    return (x / 4).reshape(*shape[:-2], columns)
