"""RMSNorm and LayerNorm, and the quantization that follows them."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from scoped_fn.kernels._formats import FP8_MAX
from scoped_fn.kernels._tiles import Tile, tile_for
from scoped_fn.kernels.gpu.cast import amax_of, load_tile, raise_amax, saturating_cast, store_tile
from scoped_fn.kernels.gpu.launch import arch_of, empty_quantized, rounds_first, wide


@triton.jit
def normalized(x, mean, rstd, k, K, weight_ptr, stride_weight, bias_ptr, stride_bias):
    """Returns `(x - mean) * rstd * weight + bias` for columns `k`, 0 outside; without `bias_ptr`, of RMSNorm."""
    inside = k < K
    column = k.to(tl.int64)
    weight = tl.load(weight_ptr + column * stride_weight, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is None:
        y = x * rstd[:, None] * weight[None, :]
    else:
        bias = tl.load(bias_ptr + column * stride_bias, mask=inside, other=0.0).to(tl.float32)
        y = (x - mean[:, None]) * rstd[:, None] * weight[None, :] + bias[None, :]
    return y


@triton.jit
def norm_quantize_rows_kernel(
    x_ptr,  # (B, M, K)
    weight_ptr,  # (B, K)
    bias_ptr,  # (B, K), or None for RMSNorm
    scale_ptr,  # (B,)
    data_ptr,  # (B, M, K)
    amax_ptr,  # (B,), zeros before
    mean_ptr,  # (B, M), or None for RMSNorm
    rstd_ptr,  # (B, M)
    M,
    K,
    stride_b,
    stride_m,
    stride_k,
    stride_weight_b,
    stride_weight_k,
    stride_bias_b,
    stride_bias_k,
    stride_scale_b,
    epsilon,
    FP8_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least K: a row is read once
    ROUND_FIRST: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program for BLOCK_M rows, which it reads once."""
    blocks = tl.cdiv(M, BLOCK_M)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    first_m = tl.program_id(0) % blocks * BLOCK_M
    m = first_m + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    x = load_tile(x_ptr + b * stride_b, first_m, 0, M, K, stride_m, stride_k, BLOCK_M, BLOCK_K, EVEN, WIDE)
    if bias_ptr is None:
        mean = tl.zeros((BLOCK_M,), tl.float32)
        squares = tl.sum(x * x, axis=1)
    else:
        mean = tl.sum(x, axis=1) / K
        tl.store(mean_ptr + b * M + m, mean, mask=m < M)
        centered = tl.where(k[None, :] < K, x - mean[:, None], 0.0)
        squares = tl.sum(centered * centered, axis=1)
        bias_ptr += b * stride_bias_b
    rstd = 1.0 / tl.sqrt_rn(squares / K + epsilon)
    tl.store(rstd_ptr + b * M + m, rstd, mask=m < M)
    weight_ptr += b * stride_weight_b
    y = normalized(x, mean, rstd, k, K, weight_ptr, stride_weight_k, bias_ptr, stride_bias_k)
    # Rows past the end hold the bias.
    raise_amax(amax_ptr + b, amax_of(tl.where(m[:, None] < M, y, 0.0)))
    scale = tl.load(scale_ptr + b * stride_scale_b)
    data = saturating_cast(y, scale, data_ptr.dtype.element_ty, FP8_MAX, ROUND_FIRST)
    store_tile(data_ptr + b * M * K, data, first_m, 0, M, K, BLOCK_M, BLOCK_K, EVEN, WIDE)


@triton.jit
def norm_quantize_chunks_kernel(
    x_ptr,  # (B, M, K)
    weight_ptr,  # (B, K)
    bias_ptr,  # (B, K), or None for RMSNorm
    scale_ptr,  # (B,)
    data_ptr,  # (B, M, K)
    data_t_ptr,  # (B, K, M)
    amax_ptr,  # (B,), zeros before
    mean_ptr,  # (B, M), or None for RMSNorm
    rstd_ptr,  # (B, M)
    M,
    K,
    stride_b,
    stride_m,
    stride_k,
    stride_weight_b,
    stride_weight_k,
    stride_bias_b,
    stride_bias_k,
    stride_scale_b,
    epsilon,
    FP8_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program for BLOCK_M rows, which it reads twice, BLOCK_K columns at a time."""
    blocks = tl.cdiv(M, BLOCK_M)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    first_m = tl.program_id(0) % blocks * BLOCK_M
    m = first_m + tl.arange(0, BLOCK_M)
    x_ptr += b * stride_b
    weight_ptr += b * stride_weight_b
    mean = tl.zeros((BLOCK_M,), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = load_tile(x_ptr, first_m, start, M, K, stride_m, stride_k, BLOCK_M, BLOCK_K, EVEN, WIDE)
        if bias_ptr is None:
            squares += tl.sum(x * x, axis=1)
        else:
            # The mean and the squared deviations of the chunk joined to those of the columns before it: Chan, Golub
            # and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
            columns = tl.minimum(K - start, BLOCK_K)
            chunk_mean = tl.sum(x, axis=1) / columns
            centered = tl.where(k[None, :] < K, x - chunk_mean[:, None], 0.0)
            apart = chunk_mean - mean
            share = columns / (start + columns)
            mean += apart * share
            squares += tl.sum(centered * centered, axis=1) + apart * apart * (start * share)
    rstd = 1.0 / tl.sqrt_rn(squares / K + epsilon)
    tl.store(rstd_ptr + b * M + m, rstd, mask=m < M)
    if bias_ptr is not None:
        tl.store(mean_ptr + b * M + m, mean, mask=m < M)
        bias_ptr += b * stride_bias_b
    scale = tl.load(scale_ptr + b * stride_scale_b)
    largest = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = load_tile(x_ptr, first_m, start, M, K, stride_m, stride_k, BLOCK_M, BLOCK_K, EVEN, WIDE)
        y = normalized(x, mean, rstd, k, K, weight_ptr, stride_weight_k, bias_ptr, stride_bias_k)
        largest = tl.maximum(largest, tl.where(m[:, None] < M, tl.abs(y), 0.0), propagate_nan=tl.PropagateNan.NONE)
        data = saturating_cast(y, scale, data_ptr.dtype.element_ty, FP8_MAX, ROUND_FIRST)
        store_tile(data_ptr + b * M * K, data, first_m, start, M, K, BLOCK_M, BLOCK_K, EVEN, WIDE)
        if TRANSPOSE:
            store_tile(data_t_ptr + b * M * K, tl.trans(data), start, first_m, K, M, BLOCK_K, BLOCK_M, EVEN, WIDE)
    raise_amax(amax_ptr + b, amax_of(largest))


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    transpose: bool,
    *,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `x * rstd * weight` in FP8, with `rstd = 1 / sqrt(mean(x^2) + eps)`, computed in float32.

    Args:
        x: `(B, M, K)`, any strides.
        weight: `(B, K)`, any float dtype.
        scale: `(B,)`, float32.
        eps: Added to the mean of squares.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        transpose: Whether to write `data_t`.
        tile: Launch configuration: `block_m` by `block_k`; with `block_k` of at least K, one pass over memory.

    Returns:
        `data` `(B, M, K)`; `data_t` `(B, K, M)`, or `(B, 0, 0)` without `transpose`; `amax` `(B,)`, float32, of the
        result before it is scaled; `rstd` `(B, M)`, float32.
    """
    data, data_t, amax, _, rstd = _norm_quantize(x, weight, None, scale, eps, dtype, transpose, tile)
    return data, data_t, amax, rstd


def layer_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    transpose: bool,
    *,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `(x - mean) * rstd * weight + bias` in FP8, with `rstd = 1 / sqrt(biased variance + eps)`.

    Args:
        x: `(B, M, K)`, any strides.
        weight: `(B, K)`, any float dtype.
        bias: `(B, K)`, any float dtype.
        scale: `(B,)`, float32.
        eps: Added to the variance.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        transpose: Whether to write `data_t`.
        tile: Launch configuration: `block_m` by `block_k`; with `block_k` of at least K, one pass over memory.

    Returns:
        `data` `(B, M, K)`; `data_t` `(B, K, M)`, or `(B, 0, 0)` without `transpose`; `amax` `(B,)`, float32, of the
        result before it is scaled; `mean` and `rstd`, both `(B, M)`, float32.
    """
    return _norm_quantize(x, weight, bias, scale, eps, dtype, transpose, tile)


def _norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    transpose: bool,
    tile: Tile | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both norms; `mean` is empty without `bias`."""
    batch, rows, columns = x.shape
    data, data_t = empty_quantized(x, dtype, transpose)
    amax = torch.zeros((batch,), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        # The mean of nothing.
        nan = torch.full((batch, rows), math.nan, dtype=torch.float32, device=x.device)
        return data, data_t, amax, nan, nan.clone()
    rstd = torch.empty((batch, rows), dtype=torch.float32, device=x.device)
    mean = None if bias is None else torch.empty_like(rstd)
    arch = arch_of(x)
    variant = "transpose" if transpose else ""
    tile = tile or tile_for("norm_quantize", rows, columns, variant=variant, arch=arch)
    at_once = tile.block_k >= columns and not transpose
    kernel = norm_quantize_rows_kernel if at_once else norm_quantize_chunks_kernel
    outputs = (data, amax, mean, rstd) if at_once else (data, data_t, amax, mean, rstd)
    kernel[(batch * triton.cdiv(rows, tile.block_m),)](
        x,
        weight,
        bias,
        scale,
        *outputs,
        rows,
        columns,
        *x.stride(),
        *weight.stride(),
        *(weight if bias is None else bias).stride(),
        *scale.stride(),
        eps,
        FP8_MAX=FP8_MAX[dtype],
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        **({} if at_once else {"TRANSPOSE": transpose}),
        ROUND_FIRST=rounds_first(arch),
        EVEN=tile.divides(rows, columns),
        WIDE=wide(tile, rows, columns, x),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return data, data_t, amax, rstd if mean is None else mean, rstd
