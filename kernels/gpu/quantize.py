"""Quantization with one scale for a tensor, given or computed, or one for a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scoped_fn.kernels import _reference as reference
from scoped_fn.kernels._formats import FLOAT32_MAX, FP8_MAX
from scoped_fn.kernels._tiles import Tile, tile_for
from scoped_fn.kernels.gpu.cast import (
    amax_of,
    load_tile,
    raise_amax,
    saturating_cast,
    scale_of,
    store_tile,
    tile_at,
)
from scoped_fn.kernels.gpu.launch import arch_of, empty_quantized, processors, rounds_first, wide


@triton.jit
def quantize_kernel(
    x_ptr,  # (B, M, K)
    data_ptr,  # (B, M, K)
    data_t_ptr,  # (B, K, M)
    scale_ptr,  # (B,) or (B, M)
    amax_ptr,  # (B,), zeros before
    M,
    K,
    stride_b,
    stride_m,
    stride_k,
    stride_scale_b,
    stride_scale_m,
    FP8_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program for a tile; one atomic operation for its amax."""
    b, first_m, first_k = tile_at(tl.program_id(0), M, K, BLOCK_M, BLOCK_K)
    x = load_tile(x_ptr + b * stride_b, first_m, first_k, M, K, stride_m, stride_k, BLOCK_M, BLOCK_K, EVEN, WIDE)
    raise_amax(amax_ptr + b, amax_of(x))
    scale_ptr += b * stride_scale_b
    if ROW_SCALES:
        m = first_m + tl.arange(0, BLOCK_M)
        scale = tl.load(scale_ptr + m.to(tl.int64) * stride_scale_m, mask=m < M, other=1.0)[:, None]
    else:
        scale = tl.load(scale_ptr)
    data = saturating_cast(x, scale, data_ptr.dtype.element_ty, FP8_MAX, ROUND_FIRST)
    store_tile(data_ptr + b * M * K, data, first_m, first_k, M, K, BLOCK_M, BLOCK_K, EVEN, WIDE)
    if TRANSPOSE:
        store_tile(data_t_ptr + b * M * K, tl.trans(data), first_k, first_m, K, M, BLOCK_K, BLOCK_M, EVEN, WIDE)


@triton.jit(do_not_specialize=["PROGRAMS"])
def amax_kernel(
    x_ptr,  # (B, M, K)
    amax_ptr,  # (B,), zeros before
    M,
    K,
    stride_b,
    stride_m,
    stride_k,
    PROGRAMS,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """PROGRAMS programs for a matrix, each for many tiles; one atomic operation for each program."""
    b = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)
    largest = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for tile in tl.range(tl.program_id(0) % PROGRAMS, tiles, PROGRAMS):
        _, first_m, first_k = tile_at(tile, M, K, BLOCK_M, BLOCK_K)
        x = load_tile(x_ptr + b * stride_b, first_m, first_k, M, K, stride_m, stride_k, BLOCK_M, BLOCK_K, EVEN, WIDE)
        largest = tl.maximum(largest, tl.abs(x), propagate_nan=tl.PropagateNan.NONE)
    raise_amax(amax_ptr + b, amax_of(largest))


@triton.jit
def quantize_current_kernel(
    x_ptr,  # (B, M, K)
    data_ptr,  # (B, M, K)
    data_t_ptr,  # (B, K, M)
    amax_ptr,  # (B,)
    scale_inv_ptr,  # (B,)
    M,
    K,
    stride_b,
    stride_m,
    stride_k,
    epsilon,
    FP8_MAX: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program for a tile."""
    b, first_m, first_k = tile_at(tl.program_id(0), M, K, BLOCK_M, BLOCK_K)
    x = load_tile(x_ptr + b * stride_b, first_m, first_k, M, K, stride_m, stride_k, BLOCK_M, BLOCK_K, EVEN, WIDE)
    # Every program computes the scale anew from the amax, which saves a launch between the two.
    scale, scale_inv = scale_of(tl.load(amax_ptr + b), epsilon, FP8_MAX, LIMIT, POWER_OF_2)
    data = saturating_cast(x, scale, data_ptr.dtype.element_ty, FP8_MAX, ROUND_FIRST)
    store_tile(data_ptr + b * M * K, data, first_m, first_k, M, K, BLOCK_M, BLOCK_K, EVEN, WIDE)
    if TRANSPOSE:
        store_tile(data_t_ptr + b * M * K, tl.trans(data), first_k, first_m, K, M, BLOCK_K, BLOCK_M, EVEN, WIDE)
    tl.store(scale_inv_ptr + b, scale_inv, mask=tl.program_id(0) % (tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)) == 0)


def quantize(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, transpose: bool, *, tile: Tile | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `x * scale` in FP8, the same transposed, and the amax of `x`, from one read of `x`.

    Args:
        x: `(B, M, K)`, any strides.
        scale: `(B, 1)` or `(B, M)`, float32.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        transpose: Whether to write `data_t`.
        tile: Launch configuration: `block_m` by `block_k`.

    Returns:
        `data` `(B, M, K)`; `data_t` `(B, K, M)`, or `(B, 0, 0)` without `transpose`; `amax` `(B,)`, float32.
    """
    batch, rows, columns = x.shape
    data, data_t = empty_quantized(x, dtype, transpose)
    amax = torch.zeros((batch,), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return data, data_t, amax
    arch = arch_of(x)
    tile = tile or tile_for("quantize", rows, columns, variant="transpose" if transpose else "", arch=arch)
    quantize_kernel[(tile.count(batch, rows, columns),)](
        x,
        data,
        data_t,
        scale,
        amax,
        rows,
        columns,
        *x.stride(),
        *scale.stride(),
        FP8_MAX=FP8_MAX[dtype],
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        TRANSPOSE=transpose,
        ROW_SCALES=scale.shape[1] != 1,
        ROUND_FIRST=rounds_first(arch),
        EVEN=tile.divides(rows, columns),
        WIDE=wide(tile, rows, columns, x),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return data, data_t, amax


def amax(x: torch.Tensor, *, tile: Tile | None = None) -> torch.Tensor:
    """Returns max |x|, `(B,)` in float32: NaN ignored, inf kept, 0 for an empty matrix.

    Args:
        x: `(B, M, K)`, any strides.
        tile: Launch configuration: `block_m` by `block_k`, `group` programs for each multiprocessor.
    """
    batch, rows, columns = x.shape
    largest = torch.zeros((batch,), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return largest
    tile = tile or tile_for("amax", rows, columns, arch=arch_of(x))
    # A few programs for each multiprocessor, whatever the batch, and never more than there are tiles.
    programs = min(tile.count(1, rows, columns), triton.cdiv(tile.group * processors(x), batch))
    amax_kernel[(batch * programs,)](
        x,
        largest,
        rows,
        columns,
        *x.stride(),
        programs,
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        EVEN=tile.divides(rows, columns),
        WIDE=wide(tile, rows, columns, x),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return largest


def quantize_current(
    x: torch.Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    epsilon: float,
    transpose: bool,
    *,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `x` in FP8 by the scale of its own amax: two launches, and the host waits for neither.

    Args:
        x: `(B, M, K)`, any strides.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        power_of_2: Whether to round the scale down to a power of two.
        epsilon: The least amax that a scale is computed from.
        transpose: Whether to write `data_t`.
        tile: Launch configuration of the second launch: `block_m` by `block_k`.

    Returns:
        `data` `(B, M, K)`; `data_t` `(B, K, M)`, or `(B, 0, 0)` without `transpose`; `amax` and `scale_inv`, both
        `(B,)`, float32.
    """
    batch, rows, columns = x.shape
    data, data_t = empty_quantized(x, dtype, transpose)
    largest = amax(x)
    if x.numel() == 0:
        return reference.quantize_current(x, dtype, power_of_2, epsilon, transpose)
    scale_inv = torch.empty((batch,), dtype=torch.float32, device=x.device)
    arch = arch_of(x)
    tile = tile or tile_for("quantize", rows, columns, variant="transpose" if transpose else "", arch=arch)
    quantize_current_kernel[(tile.count(batch, rows, columns),)](
        x,
        data,
        data_t,
        largest,
        scale_inv,
        rows,
        columns,
        *x.stride(),
        epsilon,
        FP8_MAX=FP8_MAX[dtype],
        LIMIT=FLOAT32_MAX,
        POWER_OF_2=power_of_2,
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        TRANSPOSE=transpose,
        ROUND_FIRST=rounds_first(arch),
        EVEN=tile.divides(rows, columns),
        WIDE=wide(tile, rows, columns, x),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return data, data_t, largest, scale_inv
