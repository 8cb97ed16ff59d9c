"""From FP8 and scales back to a float format."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scoped_fn.kernels._formats import block_shape
from scoped_fn.kernels._tiles import Tile, tile_for
from scoped_fn.kernels.gpu.cast import load_tile, power_of_2, store_tile, tile_at
from scoped_fn.kernels.gpu.launch import arch_of, wide


@triton.jit
def dequantize_kernel(
    data_ptr,  # (B, M, K)
    scale_inv_ptr,  # (B, R, C)
    x_ptr,  # (B, M, K)
    M,
    K,
    stride_b,
    stride_m,
    stride_k,
    stride_scale_b,
    stride_scale_r,
    stride_scale_c,
    SCALE_ROWS: tl.constexpr,  # rows that share a scale; 0 for all
    SCALE_COLUMNS: tl.constexpr,  # likewise; at most BLOCK_K
    EXPONENTS: tl.constexpr,  # whether the scales are E8M0
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program for a tile."""
    b, first_m, first_k = tile_at(tl.program_id(0), M, K, BLOCK_M, BLOCK_K)
    data = load_tile(data_ptr + b * stride_b, first_m, first_k, M, K, stride_m, stride_k, BLOCK_M, BLOCK_K, EVEN, WIDE)
    scale_inv_ptr += b * stride_scale_b
    m = first_m + tl.arange(0, BLOCK_M)
    if SCALE_ROWS > 0:
        row = m // SCALE_ROWS
    else:
        row = tl.zeros_like(m)
    SHARING: tl.constexpr = SCALE_COLUMNS if SCALE_COLUMNS > 0 else BLOCK_K
    BLOCKS: tl.constexpr = BLOCK_K // SHARING
    block = first_k // SHARING + tl.arange(0, BLOCKS)
    mask = (m[:, None] < M) & (block[None, :] * SHARING < K)
    if SCALE_COLUMNS == 0:
        block = tl.zeros_like(block)
    offsets = row[:, None].to(tl.int64) * stride_scale_r + block[None, :].to(tl.int64) * stride_scale_c
    scale_inv = tl.load(scale_inv_ptr + offsets, mask=mask, other=0)
    if EXPONENTS:
        exponent = scale_inv.to(tl.int32)
        scale_inv = tl.where(exponent == 255, float("nan"), power_of_2(exponent))
    x = tl.reshape(data, (BLOCK_M, BLOCKS, SHARING)) * scale_inv[:, :, None]
    store_tile(
        x_ptr + b * M * K,
        tl.reshape(x, (BLOCK_M, BLOCK_K)).to(x_ptr.dtype.element_ty),
        first_m,
        first_k,
        M,
        K,
        BLOCK_M,
        BLOCK_K,
        EVEN,
        WIDE,
    )


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, out_dtype: torch.dtype, *, tile: Tile | None = None
) -> torch.Tensor:
    """Returns `data * scale_inv`, computed in float32 and rounded once.

    Args:
        data: `(B, M, K)` in FP8, any strides.
        scale_inv: `(B, R, C)`, float32, or uint8 for exponents with a bias of 127, any strides. The shape tells how
            many elements share a scale, see `block_shape`.
        out_dtype: float32, bfloat16 or float16.
        tile: Launch configuration: `block_m` by `block_k`, which is at least 128.

    Returns:
        `(B, M, K)` of `out_dtype`.
    """
    batch, rows, columns = data.shape
    x = torch.empty((batch, rows, columns), dtype=out_dtype, device=data.device)
    if x.numel() == 0:
        return x
    tile = tile or tile_for("dequantize", rows, columns, arch=arch_of(data))
    scale_rows, scale_columns = block_shape(data, scale_inv)
    dequantize_kernel[(tile.count(batch, rows, columns),)](
        data,
        scale_inv,
        x,
        rows,
        columns,
        *data.stride(),
        *scale_inv.stride(),
        SCALE_ROWS=0 if scale_rows == rows else scale_rows,
        SCALE_COLUMNS=0 if scale_columns == columns else scale_columns,
        EXPONENTS=scale_inv.dtype == torch.uint8,
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        EVEN=tile.divides(rows, columns),
        WIDE=wide(tile, rows, columns, data),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return x
