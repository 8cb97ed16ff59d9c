"""MXFP8: quantization with a power of two for each block of 32 along a row, stored as its biased exponent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scoped_fn.kernels._formats import FP8_MAX, MX_BLOCK, ceil_div
from scoped_fn.kernels._tiles import Tile, tile_for
from scoped_fn.kernels.gpu.cast import (
    amax_along,
    e8m0_of,
    load_tile,
    power_of_2,
    saturating_cast,
    store_tile,
    tile_at,
)
from scoped_fn.kernels.gpu.launch import arch_of, empty_quantized, rounds_first, wide


@triton.jit
def quantize_mx_kernel(
    x_ptr,  # (B, M, K)
    data_ptr,  # (B, M, K)
    scale_ptr,  # (B, M, ceil(K / 32))
    data_t_ptr,  # (B, K, M)
    scale_t_ptr,  # (B, K, ceil(M / 32))
    M,
    K,
    stride_b,
    stride_m,
    stride_k,
    FP8_MAX: tl.constexpr,
    ONE_OVER_FP8_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr,  # a multiple of 32 with TRANSPOSE
    BLOCK_K: tl.constexpr,  # a multiple of 32
    TRANSPOSE: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program for a tile of whole blocks of 32."""
    FP8: tl.constexpr = data_ptr.dtype.element_ty
    b, first_m, first_k = tile_at(tl.program_id(0), M, K, BLOCK_M, BLOCK_K)
    x = load_tile(x_ptr + b * stride_b, first_m, first_k, M, K, stride_m, stride_k, BLOCK_M, BLOCK_K, EVEN, WIDE)
    BLOCKS_K: tl.constexpr = BLOCK_K // 32
    x_blocks = tl.reshape(x, (BLOCK_M, BLOCKS_K, 32))
    exponent = e8m0_of(amax_along(x_blocks, 2), ONE_OVER_FP8_MAX)
    data = saturating_cast(x_blocks, power_of_2(254 - exponent)[:, :, None], FP8, FP8_MAX, ROUND_FIRST)
    store_tile(
        data_ptr + b * M * K, tl.reshape(data, (BLOCK_M, BLOCK_K)), first_m, first_k, M, K, BLOCK_M, BLOCK_K, EVEN, WIDE
    )
    blocks = tl.cdiv(K, 32)
    scale_ptr += b * M * blocks
    store_tile(
        scale_ptr,
        exponent.to(tl.uint8),
        first_m,
        first_k // 32,
        M,
        blocks,
        BLOCK_M,
        BLOCKS_K,
        EVEN,
        WIDE,
    )
    if TRANSPOSE:
        BLOCKS_M: tl.constexpr = BLOCK_M // 32
        x_blocks = tl.reshape(x, (BLOCKS_M, 32, BLOCK_K))
        exponent = e8m0_of(amax_along(x_blocks, 1), ONE_OVER_FP8_MAX)
        data = saturating_cast(x_blocks, power_of_2(254 - exponent)[:, None, :], FP8, FP8_MAX, ROUND_FIRST)
        data = tl.trans(tl.reshape(data, (BLOCK_M, BLOCK_K)))
        store_tile(data_t_ptr + b * M * K, data, first_k, first_m, K, M, BLOCK_K, BLOCK_M, EVEN, WIDE)
        blocks = tl.cdiv(M, 32)
        scale_t_ptr += b * K * blocks
        scale_t = tl.trans(exponent.to(tl.uint8))
        store_tile(
            scale_t_ptr,
            scale_t,
            first_k,
            first_m // 32,
            K,
            blocks,
            BLOCK_K,
            BLOCKS_M,
            EVEN,
            WIDE,
        )


def quantize_mx(
    x: torch.Tensor, dtype: torch.dtype, transpose: bool, *, tile: Tile | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `x` in FP8 with a power of two for each block of 32 along a row.

    Args:
        x: `(B, M, K)`, any strides.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        transpose: Whether to write `data_t`, quantized on its own from the same read, in blocks of 32 along M.
        tile: Launch configuration: `block_m` by `block_k`, multiples of 32.

    Returns:
        `data` `(B, M, K)`; `scale` `(B, M, ceil(K / 32))`, uint8: the exponent of the factor that gives `x` back, plus
        127; `data_t` `(B, K, M)` and `scale_t` `(B, K, ceil(M / 32))`, both `(B, 0, 0)` without `transpose`.
    """
    batch, rows, columns = x.shape
    data, data_t = empty_quantized(x, dtype, transpose)
    shape_t = (batch, columns, ceil_div(rows, MX_BLOCK)) if transpose else (batch, 0, 0)
    scale = torch.empty((batch, rows, ceil_div(columns, MX_BLOCK)), dtype=torch.uint8, device=x.device)
    scale_t = torch.empty(shape_t, dtype=torch.uint8, device=x.device)
    if x.numel() == 0:
        return data, scale, data_t, scale_t
    arch = arch_of(x)
    tile = tile or tile_for("quantize_mx", rows, columns, variant="transpose" if transpose else "", arch=arch)
    quantize_mx_kernel[(tile.count(batch, rows, columns),)](
        x,
        data,
        scale,
        data_t,
        scale_t,
        rows,
        columns,
        *x.stride(),
        FP8_MAX=FP8_MAX[dtype],
        ONE_OVER_FP8_MAX=1.0 / FP8_MAX[dtype],
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        TRANSPOSE=transpose,
        ROUND_FIRST=rounds_first(arch),
        EVEN=tile.divides(rows, columns),
        WIDE=wide(tile, rows, columns, x),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return data, scale, data_t, scale_t
