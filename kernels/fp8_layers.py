"""`linear` and `matmul` in low precision, for tensors of any shape."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from scoped_fn.kernels._checks import FLOATS
from scoped_fn.kernels._operands import encode
from scoped_fn.kernels.fp8_matmul import Codes, Optional, matmul_op
from scoped_fn.kernels.rules import Quantizer

Scales = tuple[Optional, Optional, Optional]
Results = tuple[Tensor, Tensor, Tensor]
NO_SCALES: Scales = (None, None, None)
NO_CODES: Codes = (None, None, None, None)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Optional,
    rule: str,
    scales: Scales = NO_SCALES,
    sink: Optional = None,
    codes: Codes = NO_CODES,
) -> Results:
    """Returns x @ weight.T + bias in low precision, the amaxes of x and weight, and the sink.

    Differentiable at every order and in both modes: the gradients are products in low precision too, and beyond the
    first order quantization counts as the identity (straight through).

    Args:
        x: (..., K), float32, bfloat16 or float16.
        weight: (N, K), or (K,).
        bias: (N,) or None.
        rule: A `MatmulRule`, as text.
        scales: Of x, of weight and of the gradient of the result, float32 (), where the rule is "delayed".
        sink: float32 (), of any value. The gradient of it is the greater of the cotangent that it receives and the
            amax of the gradient of the result, so amaxes combine along a chain of sinks.
        codes: The weight, quantized before: data (G, N, K) and scale_inv of its rows, then of its columns, as
            `encode_weight` gives them.

    Returns:
        The result (..., N) in the dtype of x, amaxes float32 (2,), which have no gradient, and the sink.

    Example:
        >>> from scoped_fn.kernels import MatmulRule, Quantizer
        >>> rule = MatmulRule(*[Quantizer("current")] * 3)
        >>> y, amaxes, _ = fp8_linear(torch.ones(2, 3), torch.ones(4, 3), None, str(rule))
        >>> y.allclose(torch.full((2, 4), 3.0))
        True
    """
    if weight.dim() == 1:
        y, amax, sink = fp8_linear(x, weight[None], None, rule, scales, sink, codes)
        return y.squeeze(-1) if bias is None else y.squeeze(-1) + bias.to(y.dtype), amax, sink
    x, weight, bias = _as_autocast_does(x, weight, bias)
    columns = x.shape[-1]
    rows = x.reshape(1, 1, prod(x.shape[:-1]), columns)
    return _call(rows, weight[None, None], bias, rule, scales, sink, codes, (*x.shape[:-1], weight.shape[0]))


def fp8_matmul(
    x: Tensor,
    w: Tensor,
    rule: str,
    scales: Scales = NO_SCALES,
    sink: Optional = None,
    codes: Codes = NO_CODES,
    swapped: bool = False,
) -> Results:
    """Returns `torch.matmul(x, w)` in low precision, or `torch.matmul(w, x)` if `swapped`.

    Args:
        x: Any shape that matmul takes; a batch of matrices has one scale, as a tensor.
        w: The weight, or a second activation.
        rule: As in `fp8_linear`.
        scales: As in `fp8_linear`.
        sink: As in `fp8_linear`.
        codes: As in `fp8_linear`, of the rows of w.mT.
        swapped: Whether the weight comes first.

    Returns:
        The product, amaxes (2,) of x and w, and the sink.
    """
    if swapped:
        return _swapped(x, w, rule, scales, sink, codes)
    if w.dim() <= 2:
        matrix = w.mT if w.dim() == 2 else w[None]
        y, amax, sink = fp8_linear(x, matrix, None, rule, scales, sink, codes)
        return y if w.dim() == 2 else y.squeeze(-1), amax, sink
    x, w, _ = _as_autocast_does(x, w, None)
    left = x[None] if x.dim() == 1 else x
    batch = torch.broadcast_shapes(left.shape[:-2], w.shape[:-2])  # type: ignore[no-untyped-call]
    left_batch = left.expand(*batch, *left.shape[-2:]).reshape(1, prod(batch), *left.shape[-2:])
    right_batch = w.expand(*batch, *w.shape[-2:]).reshape(1, prod(batch), *w.shape[-2:])
    shape = (*batch, *left.shape[-2:-1], w.shape[-1])
    y, amax, sink = _call(left_batch, right_batch.mT, None, rule, scales, sink, codes, shape)
    return y.squeeze(-2) if x.dim() == 1 else y, amax, sink


def encode_weight(weight: Tensor, quantizer: Quantizer, scale: Optional) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns a weight as the codes that `fp8_linear` takes, and its amax.

    Args:
        weight: (..., N, K).
        quantizer: How.
        scale: float32 (), where the quantizer is "delayed".

    Returns:
        Data and scale_inv of the rows, then of the columns unless they are views of the rows; amax float32 ().
    """
    matrices = weight.reshape(1, prod(weight.shape[:-2]), *weight.shape[-2:])
    encoded = encode(matrices, quantizer, None if scale is None else scale[None], transpose=True)
    codes = [encoded.rows.data, encoded.rows.scale]
    if quantizer.kind not in ("delayed", "current") or weight.device.type != "cpu":
        codes += [encoded.columns.data, encoded.columns.scale]
    return tuple(code for code in codes if code is not None), encoded.amax[0]


def _swapped(x: Tensor, w: Tensor, rule: str, scales: Scales, sink: Optional, codes: Codes) -> Results:
    if w.dim() == 1:
        return fp8_matmul(x.mT if x.dim() > 1 else x, w, rule, scales, sink, codes)
    if x.dim() == 1:
        y, amax, sink = fp8_matmul(x[None], w.mT, rule, scales, sink, codes)
        return y.squeeze(-2), amax, sink
    y, amax, sink = fp8_matmul(x.mT, w.mT, rule, scales, sink, codes)
    return y.mT, amax, sink


def _call(
    x: Tensor,
    w: Tensor,
    bias: Optional,
    rule: str,
    scales: Scales,
    sink: Optional,
    codes: Codes,
    shape: tuple[int, ...],
) -> Results:
    if x.dtype != w.dtype or x.dtype not in FLOATS:
        raise TypeError(
            f"Expected an input and a weight of one dtype, float32, bfloat16 or float16, got {x.dtype} and {w.dtype}. "
            "Convert one of them."
        )
    sink = x.new_zeros((), dtype=torch.float32) if sink is None else sink
    batch_of_one = [None if t is None else t[None] for t in (bias, *scales, sink, *codes)]
    y, amax, sink = matmul_op(x, w, *batch_of_one, rule)
    return y.view(shape), amax.view(2), sink.view(())


def _as_autocast_does(x: Tensor, w: Tensor, bias: Optional) -> tuple[Tensor, Tensor, Optional]:
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, w, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)
