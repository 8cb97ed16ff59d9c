"""Operands of a matmul in low precision, and their product, by the operators of this room."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from scoped_fn.kernels import _ops as ops
from scoped_fn.kernels._formats import NVFP4_BLOCK
from scoped_fn.kernels.nvfp4 import hadamard_16
from scoped_fn.kernels.rules import Quantizer

# The signs of the Hadamard transform, a bit for each: any fixed choice, the same for both operands of a product.
SIGNS: Final = 0b1101011111101000


class Operand(NamedTuple):
    """A batch of matrices (N, R, K), read along K.

    Attributes:
        data: Codes; numbers in high precision where there is no scale.
        scale: scale_inv (N, r, c) in the layouts of `Quantized`, or None.
        amax: float32 (N,), where NVFP4 needs it, or None.
    """

    data: Tensor
    scale: Tensor | None = None
    amax: Tensor | None = None

    def values(self) -> Tensor:
        """Returns the numbers that the operand stands for, float32 unless they are in high precision."""
        if self.scale is None:
            return self.data
        if self.amax is not None:
            return ops.dequantize_nvfp4(self.data, self.scale, self.amax, torch.float32)  # type: ignore[no-any-return]
        return ops.dequantize(self.data, self.scale, torch.float32)  # type: ignore[no-any-return]


class Encoded(NamedTuple):
    """A tensor x (B, G, M, K) as operands with N = B * G.

    Attributes:
        rows: Matrices (M, K).
        columns: Matrices (K, M); of no content where they were not asked for and are no views of the rows.
        amax: The largest |x| of each of B, float32; zeros where the quantizer does not record it.
    """

    rows: Operand
    columns: Operand
    amax: Tensor


def encode(x: Tensor, quantizer: Quantizer, scale: Tensor | None, *, transpose: bool, record: bool = False) -> Encoded:
    """Returns x as operands of matmuls.

    Args:
        x: (B, G, M, K), float32, bfloat16 or float16.
        quantizer: How.
        scale: float32 (B,), of a "delayed" quantizer.
        transpose: Whether the columns are needed.
        record: Whether the amax of a tensor in high precision is wanted.
    """
    if len(x) > 1 and x.stride(0) == 0 and (scale is None or scale.stride(0) == 0):
        # One tensor that a batch shares: quantized once.
        one = encode(x[:1], quantizer, None if scale is None else scale[:1], transpose=transpose, record=record)
        return _repeated(one, len(x))
    if quantizer.kind == "none":
        return _high_precision(x, record)
    if quantizer.kind in ("delayed", "current"):
        return _per_tensor(x, quantizer, scale, transpose and x.device.type != "cpu")
    matrices, nothing = x.flatten(0, 1), x.new_zeros(len(x), dtype=torch.float32)
    if quantizer.kind == "nvfp4":
        return Encoded(*_nvfp4(matrices, quantizer, transpose), nothing)
    if quantizer.kind == "mx":
        data, scales, data_t, scales_t = ops.quantize_mx(matrices, quantizer.dtype, transpose)
        return Encoded(Operand(data, scales), Operand(data_t, scales_t), nothing)
    options = quantizer.dtype, quantizer.block_rows, quantizer.power_of_2, quantizer.epsilon, transpose
    data, scales, data_t, scales_t = ops.quantize_blocks(matrices, *options)
    scales_t = scales_t.mT if quantizer.block_rows == 1 else scales
    return Encoded(Operand(data, scales.mT), Operand(data_t, scales_t), nothing)


def _high_precision(x: Tensor, record: bool) -> Encoded:
    matrices, amax = x.flatten(0, 1), x.new_zeros(len(x), dtype=torch.float32)
    if record and x.numel():
        amax = x.float().abs().nan_to_num(0, torch.inf).amax((1, 2, 3))
    return Encoded(Operand(matrices), Operand(matrices.mT), amax)


def _per_tensor(x: Tensor, quantizer: Quantizer, scale: Tensor | None, copy: bool) -> Encoded:
    """One scale for each of B. The transposed copy is written where hardware reads both operands along K."""
    batch, group, m, k = x.shape
    flat, copy = x.flatten(1, 2), copy and group == 1
    if quantizer.kind == "delayed":
        assert scale is not None
        data, data_t, amax = ops.quantize(flat, scale[:, None], quantizer.dtype, copy)
        scale_inv, recorded = scale.reciprocal(), amax
    else:
        options = quantizer.dtype, quantizer.power_of_2, quantizer.epsilon, copy
        data, data_t, amax, scale_inv = ops.quantize_current(flat, *options)
        recorded = torch.zeros_like(amax)
    data = data.view(batch * group, m, k)
    scales = scale_inv.view(batch, 1, 1) if group == 1 else scale_inv.repeat_interleave(group).view(-1, 1, 1)
    return Encoded(Operand(data, scales), Operand(data_t if copy else data.mT, scales), recorded)


def _nvfp4(x: Tensor, quantizer: Quantizer, transpose: bool) -> tuple[Operand, Operand]:
    rows = quantizer.block_rows
    noise = _noise(x) if quantizer.stochastic else None
    data, scales, data_t, scales_t, amax = ops.quantize_nvfp4(x, rows, noise, transpose and not quantizer.hadamard)
    columns = Operand(data_t, scales_t, amax)
    if transpose and quantizer.hadamard:
        places = torch.arange(NVFP4_BLOCK, device=x.device)  # no constant tensor: a trace has to stay functional
        signs = (1 - 2 * (torch.bitwise_right_shift(SIGNS, places) & 1)).to(x.dtype)
        spread = hadamard_16(pad(x.mT, (0, -x.shape[1] % NVFP4_BLOCK)), signs).contiguous()
        noise = _noise(spread) if quantizer.stochastic else None
        data_t, scales_t, _, _, amax_t = ops.quantize_nvfp4(spread, rows, noise, False)
        columns = Operand(data_t, scales_t, amax_t)
    return Operand(data, scales, amax), columns


def _noise(x: Tensor) -> Tensor:
    """Returns numbers in [0, 1), float32 in the shape of x (N, R, K): a hash of each element and of its place.

    A function of x alone: the same x is rounded in the same way, in forward, recomputation and under transforms.
    """
    place = torch.arange(x.shape[1] * x.shape[2], device=x.device).view(x.shape[1:])
    bits = x.float().contiguous().view(torch.int32).to(torch.int64)
    hashed = (bits * 0x9E3779B1 + place * 0x85EBCA77) & 0xFFFFFFFF
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & 0xFFFFFFFF
    return (((hashed ^ (hashed >> 16)) >> 8).float()) * 2.0**-24


def _repeated(one: Encoded, batch: int) -> Encoded:
    def repeat(part: Tensor | None) -> Tensor | None:
        return None if part is None else part[None].expand(batch, *part.shape).flatten(0, 1)

    rows, columns = (Operand(*map(repeat, operand)) for operand in (one.rows, one.columns))  # type: ignore[arg-type]
    return Encoded(rows, columns, one.amax.expand(batch))


def product(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Returns a (N, M, K) times transposed b (N, R, K), plus bias (N, R): (N, M, R)."""
    if a.scale is None and b.scale is None:
        return _high_precision_product(a.data, b.data, bias).to(out_dtype)
    if a.scale is not None and b.scale is not None and a.scale.dtype == b.scale.dtype == torch.float32:
        y: Tensor = ops.scaled_mm(a.data, b.data, a.scale, b.scale, bias, out_dtype, fast_accum)
        return y
    wide = a.values().double() @ b.values().double().mT  # float64, which autocast leaves alone
    return (wide if bias is None else wide + bias[:, None]).to(out_dtype)


def _high_precision_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if a.dtype != b.dtype:
        a, b = a.float(), b.float()
    if len(a) == 1:  # with the very bits of an ordinary layer
        return linear(a[0], b[0], None if bias is None else bias[0])[None]
    return a @ b.mT if bias is None else a @ b.mT + bias[:, None]
