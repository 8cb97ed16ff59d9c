"""The operators in plain torch: what runs on a CPU, and what the tests of the Triton kernels compare with.

Every tensor leads with a batch dimension B. Formulas and rounding: `docs/kernels.md`.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from scoped_fn.kernels._formats import BLOCK, E2M1, E4M3, FLOAT32_MAX, FP8_MAX, MX_BLOCK, NVFP4_BLOCK, block_shape

EXPONENT_BITS = 0x7F800000  # of a float32


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, transpose: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns data, its transposed copy, and amax (B,), for x (B, M, K) and scale (B, 1) or (B, M)."""
    values = x.float()
    amax = _amax(values, 1, 2)
    return *_cast(x, _times(values, scale[:, :, None], x), amax, dtype, transpose), amax


def quantize_current(
    x: Tensor, dtype: torch.dtype, power_of_2: bool, epsilon: float, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns data, its transposed copy, amax (B,) and scale_inv (B,), with the scale from this very amax."""
    values = x.float()
    amax = _amax(values, 1, 2)
    scale = _scale_from_amax(amax, dtype, power_of_2, epsilon, largest=FLOAT32_MAX)
    scaled = _times(values, scale[:, None, None], x)
    return *_cast(x, scaled, amax, dtype, transpose), amax, scale.reciprocal()


def quantize_blocks(
    x: Tensor, dtype: torch.dtype, block_rows: int, power_of_2: bool, epsilon: float, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns data, scale_inv (B, K / 128, M / block_rows), and both again for the transposed matrix."""
    values = x.float()
    blocks = _blocks(values, block_rows, BLOCK)
    amax = _amax(blocks, 2, 4)
    scale = _scale_from_amax(amax, dtype, power_of_2, epsilon, largest=torch.finfo(x.dtype).max)
    scaled = blocks * scale[:, :, None, :, None]
    data, data_t = _cast(values, _unblocked(scaled, x), amax, dtype, transpose and block_rows > 1)
    scale_inv, scale_inv_t = scale.reciprocal().mT.contiguous(), _nothing(scale)
    if transpose and block_rows == 1:
        data_t, scale_inv_t, _, _ = quantize_blocks(x.mT, dtype, 1, power_of_2, epsilon, False)
    return data, scale_inv, data_t, scale_inv_t


def quantize_mx(x: Tensor, dtype: torch.dtype, transpose: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns data, E8M0 bytes (B, M, K / 32), and both again for the transposed matrix."""
    values = x.float()
    blocks = _blocks(values, 1, MX_BLOCK)
    amax = _amax(blocks, 2, 4)
    exponent = _e8m0_from_amax(amax, dtype)
    scaled = blocks * _power_of_2(254 - exponent.int())[:, :, None, :, None]
    data, data_t = _cast(values, _unblocked(scaled, x), amax, dtype, False)
    exponent_t = _nothing(exponent)
    if transpose:
        data_t, exponent_t, _, _ = quantize_mx(x.mT, dtype, False)
    return data, exponent, data_t, exponent_t


def dequantize(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns data * scale_inv in float32, rounded to the dtype."""
    rows, columns = block_shape(data, scale_inv)
    if scale_inv.dtype == torch.uint8:
        exponent = scale_inv.int()
        scale_inv = torch.where(exponent == 255, torch.nan, _power_of_2(exponent))
    blocks = _blocks(_upcast(data).float(), rows, columns) * scale_inv[:, :, None, :, None]
    return _unblocked(blocks, data).to(dtype).contiguous()


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Returns dequantized a (B, M, K) times dequantized, transposed b (B, N, K), plus bias (B, N).

    Sums are in float32, so fast accumulation has no meaning here.
    """
    if len(a) > 1 and _is_one_matrix(b, scale_a, scale_b, bias):
        rows = a.flatten(0, 1)[None]
        y = scaled_mm(rows, b[:1], scale_a[:1], scale_b[:1], _first(bias), out_dtype, fast_accum)
        return y.reshape(len(a), a.shape[1], b.shape[1])
    if out_dtype == torch.bfloat16 and (bias is None or bias.dtype == torch.bfloat16):
        exact = _bfloat16_operands(a, b, scale_a, scale_b)
        if exact is not None:
            left, right, scale = exact
            start = left.new_zeros(1, 1, 1) if bias is None else bias[:, None]
            return torch.baddbmm(start, left, right.mT, beta=int(bias is not None), alpha=scale)
    if _is_of_rows(scale_a, a) and _is_of_rows(scale_b, b):
        # One scale after the other: their product may underflow where the result does not.
        y = (_upcast(_once(a)).float() @ _upcast(_once(b)).float().mT) * scale_a * scale_b.mT
    else:
        y = dequantize(a, scale_a, torch.float32) @ dequantize(b, scale_b, torch.float32).mT
    return (y if bias is None else y + bias[:, None].float()).to(out_dtype)


def update_scales(
    amax_history: Tensor, scale: Tensor, fp8_max: Tensor, most_recent: bool, margin: float
) -> tuple[Tensor, Tensor]:
    """Returns the next amax history (B, L, n) and scales (B, n); row 0 of the history is the staging row."""
    last, fp8_max = amax_history[:, 0], fp8_max * 2.0**-margin if margin else fp8_max
    # The bits of floats of at least 0 are in the order of the floats, with NaN last; whole numbers compare faster.
    amax = last if most_recent else amax_history.view(torch.int32).amax(1).view(torch.float32)
    zero = last.new_zeros(len(last), 1, last.shape[1])
    rolled = torch.cat([zero, amax_history[:, 2:], last[:, None]], 1)[:, : amax_history.shape[1]].contiguous()
    if last.numel() and last.amin().item() > 0 and amax.amax().item() < torch.inf:
        return rolled, (fp8_max / amax).clamp_max_(FLOAT32_MAX)
    idle = ~((last > 0) & (last < torch.inf))
    rolled.mT[idle] = amax_history.mT[idle]
    rolled[:, 0] = 0
    amax = _fmax(amax_history, 1) if amax.isnan().any() and not most_recent else amax
    usable = ~idle & (amax < torch.inf)
    new = (fp8_max / torch.where(usable, amax, 1.0)).clamp_max_(FLOAT32_MAX)
    return rolled, torch.where(usable, new, scale)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, scale: Tensor, eps: float, dtype: torch.dtype, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns data, its transposed copy, amax (B,) of the normalized x, and rstd (B, M)."""
    x = x.float().contiguous()  # strides would change the order of sums
    rstd = (x.square().mean(2) + eps).rsqrt()
    y = x * rstd[:, :, None] * weight[:, None].float()
    return *quantize(y, scale[:, None], dtype, transpose), rstd


def layer_norm_quantize(
    x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, eps: float, dtype: torch.dtype, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns data, its transposed copy, amax (B,) of the normalized x, mean and rstd (B, M)."""
    x = x.float().contiguous()  # strides would change the order of sums
    mean = x.mean(2)
    centered = x - mean[:, :, None]
    rstd = (centered.square().mean(2) + eps).rsqrt()
    y = centered * rstd[:, :, None] * weight[:, None].float() + bias[:, None].float()
    return *quantize(y, scale[:, None], dtype, transpose), mean, rstd


def silu_gate_quantize(
    gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns data, its transposed copy, and amax (B,) of silu(gate) * up."""
    return quantize(silu(gate.float()) * up.float(), scale[:, None], dtype, transpose)


def quantize_nvfp4(
    x: Tensor, block_rows: int, noise: Tensor | None, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns E2M1 codes (B, M, K), E4M3 scales, both again for the transposed matrix, and amax (B,) of x."""
    x = x.float().contiguous()
    amax = _amax(x, 1, 2)
    decode, encode = (s[:, None, None] for s in _nvfp4_scales(amax))
    blocks = _blocks(x, block_rows, NVFP4_BLOCK)
    scale = (_amax(blocks, 2, 4) * (encode / torch.full_like(encode, E2M1[-1]))).clamp_max(FP8_MAX[E4M3])
    scale_inv = torch.where(blocks.isfinite().all(4).all(2), scale, torch.nan).to(E4M3)
    factor = (_upcast(scale_inv).float() * decode).reciprocal().clamp_max(FLOAT32_MAX)
    data = _e2m1(_unblocked(blocks * factor[:, :, None, :, None], x), noise)
    if not transpose:
        return data, scale_inv, _nothing(data), _nothing(scale_inv), amax
    if block_rows > 1:
        return data, scale_inv, _transposed(data), _transposed(scale_inv), amax
    data_t, scale_inv_t, *_ = quantize_nvfp4(x.mT, 1, None if noise is None else noise.mT, False)
    return data, scale_inv, data_t, scale_inv_t, amax


def dequantize_nvfp4(data: Tensor, scale_inv: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of E2M1 codes (B, M, K) times their scales and that of the tensor, from amax (B,)."""
    values = torch.tensor(E2M1 + tuple(-value for value in E2M1), device=data.device)[data.int()]
    scales = _upcast(scale_inv).float() * _nvfp4_scales(amax)[0][:, None, None]
    blocks = _blocks(values, *block_shape(data, scale_inv)) * scales[:, :, None, :, None]
    return _unblocked(blocks, data).to(dtype).contiguous()


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(like.shape[0], 0, 0)


def _transposed(x: Tensor) -> Tensor:
    """Returns the transposed matrix in new memory; `contiguous` would share that of a single row or column."""
    return x.mT.clone(memory_format=torch.contiguous_format)


def _fmax(x: Tensor, *dims: int) -> Tensor:
    """Returns the maximum over some dimensions, without NaN where there is a number."""
    largest = x.amax(dims)
    return x.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(dims) if largest.isnan().any() else largest


def _amax(x: Tensor, *dims: int) -> Tensor:
    """Returns the largest |x| over some dimensions: NaN is ignored, infinity is kept, of nothing it is 0."""
    if x.numel() == 0:
        return x.sum(dims)
    amax = torch.maximum(x.amax(dims), -x.amin(dims)).abs()
    return _fmax(x.abs(), *dims).clamp_min(0) if amax.isnan().any() else amax


def _scale_from_amax(amax: Tensor, dtype: torch.dtype, power_of_2: bool, epsilon: float, largest: float) -> Tensor:
    amax = amax.clamp_min(epsilon)
    usable = (amax > 0) & amax.isfinite()
    # A tensor over a tensor: torch computes a Python number over a tensor as a reciprocal and a product, 1 ulp off.
    scale = torch.full_like(amax, FP8_MAX[dtype]) / torch.where(usable, amax, 1.0)
    scale = torch.where(usable, torch.where(scale.isinf(), largest, scale), 1.0)
    return (scale.view(torch.int32) & EXPONENT_BITS).view(torch.float32) if power_of_2 else scale


def _e8m0_from_amax(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the byte of the smallest power of two that is at least amax / FP8_MAX."""
    bits = (amax * (1 / FP8_MAX[dtype])).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa != 0) & (exponent < 254) & ((exponent > 0) | (mantissa > 0x400000))
    return (exponent + up.int()).clamp_max(254).to(torch.uint8)


def _power_of_2(exponent: Tensor) -> Tensor:
    """Returns 2 ** (exponent - 127) for biased exponents from -1 to 254; 2 ** -127, a subnormal, below 1."""
    return torch.where(exponent > 0, exponent << 23, 0x400000).view(torch.float32)


def _times(values: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """Returns values * scale, in the memory of values where that is not the caller's x: fresh memory is slow."""
    return values * scale if values is x else values.mul_(scale)


def _cast(x: Tensor, scaled: Tensor, amax: Tensor, dtype: torch.dtype, transpose: bool) -> tuple[Tensor, Tensor]:
    """Returns the scaled x rounded to FP8, saturated; elements of x that are not finite are NaN. Overwrites scaled."""
    saturated = scaled.clamp_(-FP8_MAX[dtype], FP8_MAX[dtype])
    if amax.isinf().any():
        saturated = torch.where(x.isfinite(), saturated, torch.nan)
    data = saturated.to(dtype, memory_format=torch.contiguous_format)
    return data, _transposed(data) if transpose else _nothing(data)


def _blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """Returns x (B, M, K), padded with zeros, as (B, M / rows, rows, K / columns, columns)."""
    rows, columns = min(rows, max(x.shape[1], 1)), min(columns, max(x.shape[2], 1))
    right, below = -x.shape[2] % columns, -x.shape[1] % rows
    x = pad(x, (0, right, 0, below)) if right or below else x
    batch, m, k = x.shape
    return x.reshape(batch, m // rows, rows, k // columns, columns)


def _unblocked(blocks: Tensor, x: Tensor) -> Tensor:
    return blocks.flatten(3).flatten(1, 2)[:, : x.shape[1], : x.shape[2]]


def _nvfp4_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales of a tensor: to decode, and to encode."""
    usable = (amax > 0) & amax.isfinite()
    encode = torch.full_like(amax, FP8_MAX[E4M3] * E2M1[-1]) / torch.where(usable, amax, 1.0)
    encode = torch.where(usable, encode.clamp_max(FLOAT32_MAX), 1.0)
    return encode.reciprocal(), encode


def _e2m1(x: Tensor, noise: Tensor | None) -> Tensor:
    """Returns the codes of x, saturated at 6: to nearest, ties to even, or up where noise is below the remainder."""
    values = torch.tensor(E2M1, device=x.device)
    size = x.abs().clamp_max(E2M1[-1]).nan_to_num(0)
    below = torch.searchsorted(values, size, right=True) - 1
    above = (below + 1).clamp_max(len(E2M1) - 1)
    remainder = (size - values[below]) / (values[above] - values[below]).clamp_min(0.5)
    up = noise < remainder if noise is not None else (remainder > 0.5) | ((remainder == 0.5) & (below % 2 == 1))
    return (torch.where(up, above, below) + 8 * x.signbit()).to(torch.uint8).contiguous()


def _upcast(data: Tensor) -> Tensor:
    """Returns FP8 data as bfloat16, exactly: by its bits for E4M3, which is 8 times faster than torch's own cast."""
    # Where the caller let the processor flush subnormal numbers, which those of E4M3 are on the way.
    if data.dtype != E4M3 or sys.float_info.min / 2 == 0:
        return data.to(torch.bfloat16)
    # Sign, then the 7 bits where those of a bfloat16 end its exponent: too small by 2**120 (the biases are 7 and 127).
    bits = data.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x7810)
    x = bits.view(torch.bfloat16).mul_(2.0**120)
    lowest, highest = torch.aminmax(x) if x.numel() else (x, x)
    if x.numel() and (highest > FP8_MAX[E4M3] or lowest < -FP8_MAX[E4M3]):
        x.masked_fill_(x.abs() > FP8_MAX[E4M3], torch.nan)  # the code of NaN would be 480
    return x


def _is_one_matrix(b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> bool:
    """Whether all matrices of a batch are multiplied alike."""
    return all(t is None or t.stride(0) == 0 for t in (b, scale_a, scale_b, bias)) and scale_a.shape[1:] == (1, 1)


def _is_of_rows(scale: Tensor, data: Tensor) -> bool:
    return scale.shape[2] == 1 and scale.shape[1] in (1, data.shape[1])


def _once(x: Tensor) -> Tensor:
    """Returns a batch of one where all its matrices are one in memory."""
    return x[:1] if len(x) > 1 and x.stride(0) == 0 else x


def _first(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias[:1]


def _bfloat16_operands(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> tuple[Tensor, Tensor, float] | None:
    """Returns operands that are exact in bfloat16, and a scale of their product; None where there are none."""
    if a.numel() == 0 or b.numel() == 0:
        return None
    if scale_a.numel() == scale_b.numel() == 1:
        scale = scale_a.item() * scale_b.item()
        # Far from the ends of float32. A scale of 0 would leave torch's result unwritten.
        return (_upcast(a), _upcast(b), scale) if 2.0**-100 < scale < 2.0**100 else None
    if all(_are_plain_powers_of_2(scale) for scale in (scale_a, scale_b)):
        return dequantize(a, scale_a, torch.bfloat16), dequantize(b, scale_b, torch.bfloat16), 1.0
    return None


def _are_plain_powers_of_2(scale: Tensor) -> bool:
    """Whether scales are powers of two so far from the ends that times an FP8 number is a normal bfloat16 number."""
    return bool(((scale.frexp().mantissa == 0.5) & (scale > 2.0**-64) & (scale < 2.0**64)).all())
