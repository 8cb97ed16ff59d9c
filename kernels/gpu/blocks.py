"""Quantization with a float32 scale for each block of 128 along a row, or of 128 by 128."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scoped_fn.kernels._formats import BLOCK, FP8_MAX, ceil_div
from scoped_fn.kernels._tiles import Tile, tile_for
from scoped_fn.kernels.gpu.cast import (
    amax_along,
    amax_of,
    load_tile,
    saturating_cast,
    scale_of,
    store_tile,
    tile_at,
)
from scoped_fn.kernels.gpu.launch import arch_of, empty_quantized, rounds_first, wide


@triton.jit
def quantize_rows_kernel(
    x_ptr,  # (B, M, K)
    data_ptr,  # (B, M, K)
    scale_inv_ptr,  # (B, ceil(K / 128), M)
    data_t_ptr,  # (B, K, M)
    scale_inv_t_ptr,  # (B, ceil(M / 128), K)
    M,
    K,
    stride_b,
    stride_m,
    stride_k,
    epsilon,
    FP8_MAX: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    BLOCK_M: tl.constexpr,  # 128 with TRANSPOSE
    TRANSPOSE: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program for BLOCK_M rows of one block of columns; with TRANSPOSE, for one block of each matrix."""
    b, first_m, first_k = tile_at(tl.program_id(0), M, K, BLOCK_M, 128)
    m = first_m + tl.arange(0, BLOCK_M)
    k = first_k + tl.arange(0, 128)
    x = load_tile(x_ptr + b * stride_b, first_m, first_k, M, K, stride_m, stride_k, BLOCK_M, 128, EVEN, WIDE)
    scale, scale_inv = scale_of(amax_along(x, 1), epsilon, FP8_MAX, LIMIT, POWER_OF_2)
    data = saturating_cast(x, scale[:, None], data_ptr.dtype.element_ty, FP8_MAX, ROUND_FIRST)
    store_tile(data_ptr + b * M * K, data, first_m, first_k, M, K, BLOCK_M, 128, EVEN, WIDE)
    tl.store(scale_inv_ptr + (b * tl.cdiv(K, 128) + first_k // 128) * M + m, scale_inv, mask=m < M)
    if TRANSPOSE:
        # The second read comes from the cache. To keep x instead takes 193 registers of each thread, against 124, and
        # so half of the programs at a time.
        x = load_tile(x_ptr + b * stride_b, first_m, first_k, M, K, stride_m, stride_k, BLOCK_M, 128, EVEN, WIDE)
        scale, scale_inv = scale_of(amax_along(x, 0), epsilon, FP8_MAX, LIMIT, POWER_OF_2)
        data = saturating_cast(x, scale[None, :], data_t_ptr.dtype.element_ty, FP8_MAX, ROUND_FIRST)
        store_tile(data_t_ptr + b * M * K, tl.trans(data), first_k, first_m, K, M, 128, BLOCK_M, EVEN, WIDE)
        tl.store(scale_inv_t_ptr + (b * tl.cdiv(M, 128) + first_m // 128) * K + k, scale_inv, mask=k < K)


@triton.jit
def quantize_squares_kernel(
    x_ptr,  # (B, M, K)
    data_ptr,  # (B, M, K)
    scale_inv_ptr,  # (B, ceil(K / 128), ceil(M / 128))
    data_t_ptr,  # (B, K, M)
    M,
    K,
    stride_b,
    stride_m,
    stride_k,
    epsilon,
    FP8_MAX: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program for a block of 128 by 128."""
    b, first_m, first_k = tile_at(tl.program_id(0), M, K, 128, 128)
    x = load_tile(x_ptr + b * stride_b, first_m, first_k, M, K, stride_m, stride_k, 128, 128, EVEN, WIDE)
    scale, scale_inv = scale_of(amax_of(x), epsilon, FP8_MAX, LIMIT, POWER_OF_2)
    data = saturating_cast(x, scale, data_ptr.dtype.element_ty, FP8_MAX, ROUND_FIRST)
    store_tile(data_ptr + b * M * K, data, first_m, first_k, M, K, 128, 128, EVEN, WIDE)
    block = (b * tl.cdiv(K, 128) + first_k // 128) * tl.cdiv(M, 128) + first_m // 128
    tl.store(scale_inv_ptr + block, scale_inv)
    if TRANSPOSE:
        store_tile(data_t_ptr + b * M * K, tl.trans(data), first_k, first_m, K, M, 128, 128, EVEN, WIDE)


def quantize_blocks(
    x: torch.Tensor,
    dtype: torch.dtype,
    block_rows: int,
    power_of_2: bool,
    epsilon: float,
    transpose: bool,
    *,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `x` in FP8 with a scale for each block of 128 columns and `block_rows` rows.

    Args:
        x: `(B, M, K)`, any strides.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        block_rows: 1 or 128.
        power_of_2: Whether to round the scales down to powers of two.
        epsilon: The least amax that a scale is computed from.
        transpose: Whether to write `data_t`: quantized on its own from the same read, in blocks of 128 along M, for
            `block_rows` 1; the transpose of `data` for 128.
        tile: Launch configuration: `block_m`, 128 but where `block_rows` is 1 and `transpose` is false, by a `block_k`
            of 128.

    Returns:
        `data` `(B, M, K)`; `scale_inv` `(B, ceil(K / 128), M or ceil(M / 128))`, float32; `data_t` `(B, K, M)`;
        `scale_inv_t` `(B, ceil(M / 128), K)`, float32, for `block_rows` 1. What is not asked for is `(B, 0, 0)`.
    """
    batch, rows, columns = x.shape
    if tile is None and transpose and block_rows == 1 and (rows % 16 or columns % 16):
        # Where elements are stored one by one, their addresses leave no registers to write both from one read.
        data, scale_inv, _, _ = quantize_blocks(x, dtype, 1, power_of_2, epsilon, False)
        data_t, scale_inv_t, _, _ = quantize_blocks(x.mT, dtype, 1, power_of_2, epsilon, False)
        return data, scale_inv, data_t, scale_inv_t
    data, data_t = empty_quantized(x, dtype, transpose)
    blocks_m, blocks_k = ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)
    own_scales_t = transpose and block_rows == 1
    shape = (batch, blocks_k, rows if block_rows == 1 else blocks_m)
    shape_t = (batch, blocks_m, columns) if own_scales_t else (batch, 0, 0)
    scale_inv = torch.empty(shape, dtype=torch.float32, device=x.device)
    scale_inv_t = torch.empty(shape_t, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return data, scale_inv, data_t, scale_inv_t
    arch = arch_of(x)
    variant = f"{block_rows} transpose" if transpose else f"{block_rows}"
    tile = tile or tile_for("quantize_blocks", rows, columns, variant=variant, arch=arch)
    sizes = (rows, columns, *x.stride(), epsilon)
    options = {
        "FP8_MAX": FP8_MAX[dtype],
        "LIMIT": torch.finfo(x.dtype).max,
        "POWER_OF_2": power_of_2,
        "TRANSPOSE": transpose,
        "ROUND_FIRST": rounds_first(arch),
        "EVEN": tile.divides(rows, columns),
        "WIDE": wide(tile, rows, columns, x),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    grid = (tile.count(batch, rows, columns),)
    if block_rows == 1:
        quantize_rows_kernel[grid](x, data, scale_inv, data_t, scale_inv_t, *sizes, BLOCK_M=tile.block_m, **options)
    else:
        quantize_squares_kernel[grid](x, data, scale_inv, data_t, *sizes, **options)
    return data, scale_inv, data_t, scale_inv_t
