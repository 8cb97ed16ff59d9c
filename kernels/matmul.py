"""The product of two quantized matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from scoped_fn.kernels import _ops as ops
from scoped_fn.kernels._checks import (
    FLOATS,
    check_choice,
    check_layout,
    check_quantized,
    check_same_device,
    check_vector,
)
from scoped_fn.kernels._formats import as_rows
from scoped_fn.kernels.quantize import dequantize
from scoped_fn.kernels.quantized import Quantized


def scaled_mm(
    a: Quantized,
    b: Quantized,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> Tensor:
    """Returns ``dequantize(a) @ dequantize(b) + bias``, summed in float32 and rounded once.

    The hardware reads both operands along K, so b is used by its transposed copy: a weight w (N, K) enters as `w.mT`,
    which has it for free; another b needs ``transpose=True`` when it is quantized, or is copied here. The three
    products of a linear layer with ``y = x @ w.T``:

        y  = scaled_mm(x, w.mT)
        dx = scaled_mm(dy, w)        # w quantized with transpose=True
        dw = scaled_mm(dy.mT, x)     # both quantized with transpose=True

    Args:
        a: (..., K). Scales per tensor, per row, or per 1 x 128 or 128 x 128 block, with E4M3 or E5M2 data; MX; NVFP4.
        b: (K, N), with scales that run along K, of any of these kinds.
        bias: (N,), float32, bfloat16 or float16, or None.
        out_dtype: torch.float32, torch.bfloat16 or torch.float16.
        fast_accum: Whether the tensor cores of Hopper and Ada may keep the whole sum, with about 14 bits; False adds up
            in float32 every 128 products. Means nothing on other devices.

    Returns:
        (..., N). Differentiable with respect to bias and float32 scales; the data has no derivative. Where an
        operand is MX or NVFP4, both are dequantized and multiplied in float64, on every device.

    Raises:
        TypeError: An operand is of another type.
        ValueError: Sizes, scales or devices do not fit each other.

    Example:
        >>> from scoped_fn.kernels import quantize_current
        >>> x, w = torch.randn(5, 64), torch.randn(3, 64)
        >>> y = scaled_mm(quantize_current(x, torch.float8_e4m3fn), quantize_current(w, torch.float8_e4m3fn).mT)
        >>> (y - x @ w.T).norm() / (x @ w.T).norm() < 0.05
        tensor(True)
    """
    check_choice(out_dtype, "out_dtype", FLOATS)
    check_quantized(a, "a")
    check_quantized(b, "b")
    left, right = a._replace(data=as_rows(a.data)), b.mT
    _check_sizes(left.data, right.data, bias)
    if left.scale_inv.dtype == right.scale_inv.dtype == torch.float32:
        y = _scaled_mm(left, right, bias, out_dtype, fast_accum)
    else:
        check_same_device(left.data, b=right.data, bias=bias)
        # In float64, which autocast leaves alone: to switch it off has no effect inside torch.func.
        y = dequantize(left).double() @ dequantize(right).mT.double()
        y = (y if bias is None else y + bias).to(out_dtype)
    return y.reshape(*a.data.shape[:-1], y.shape[1])


def _scaled_mm(
    left: Quantized, right: Quantized, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    scale_a = check_layout(left.data, left.scale_inv, "a")
    scale_b = check_layout(right.data, right.scale_inv, "b.mT")
    check_same_device(left.data, b=right.data, bias=bias, scale_a=scale_a, scale_b=scale_b)
    batch_of_one = (None if t is None else t[None] for t in (left.data, right.data, scale_a, scale_b, bias))
    product: Tensor = ops.scaled_mm(*batch_of_one, out_dtype, fast_accum)
    return product[0]


def _check_sizes(left: Tensor, right: Tensor, bias: Tensor | None) -> None:
    if left.shape[1] != right.shape[1]:
        raise ValueError(
            f"Expected b of shape (K, N) = ({left.shape[1]}, N) for a of shape {tuple(left.shape)}, got "
            f"{tuple(right.shape[::-1])}. A weight (N, K) enters as w.mT."
        )
    if bias is not None:
        check_vector(bias, "bias", right.shape[0])
