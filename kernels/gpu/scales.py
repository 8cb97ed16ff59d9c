"""Delayed scaling: the new scales of all columns from their histories, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scoped_fn.kernels._formats import FLOAT32_MAX
from scoped_fn.kernels._tiles import Tile, tile_for
from scoped_fn.kernels.gpu.launch import arch_of


@triton.jit
def update_scales_kernel(
    history_ptr,  # (B, L, n)
    scale_ptr,  # (B, n)
    fp8_max_ptr,  # (B, n)
    new_history_ptr,  # (B, L, n)
    new_scale_ptr,  # (B, n)
    L,
    N,
    stride_history_b,
    stride_history_l,
    stride_history_n,
    stride_scale_b,
    stride_scale_n,
    stride_fp8_max_b,
    stride_fp8_max_n,
    margin_factor,  # 2^-margin
    MOST_RECENT: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program for BLOCK_N columns, all of their history."""
    blocks = tl.cdiv(N, BLOCK_N)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    n = (tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inside = n < N
    history_ptr += b * stride_history_b + n * stride_history_n
    new_history_ptr += b * L * N + n
    last = tl.load(history_ptr, mask=inside, other=0.0)
    rolls = (last > 0.0) & (last < float("inf"))
    # The window is every row: rows 1 to L - 1, and `last`, which is row 0.
    largest = last
    shift = rolls.to(tl.int64)
    for start in tl.range(0, L, BLOCK_L):
        row = start + tl.arange(0, BLOCK_L)
        mask = (row[:, None] < L) & inside[None, :]
        h = tl.load(history_ptr[None, :] + row[:, None].to(tl.int64) * stride_history_l, mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.max(h, axis=0), propagate_nan=tl.PropagateNan.NONE)
        to = row[:, None] - shift[None, :]
        tl.store(new_history_ptr[None, :] + to * N, h, mask=mask & (to > 0))
    tl.store(new_history_ptr + (tl.zeros_like(n) + L - 1) * N, last, mask=inside & rolls & (L > 1))
    tl.store(new_history_ptr, tl.zeros_like(last), mask=inside)
    a = last if MOST_RECENT else largest
    usable = rolls & (a > 0.0) & (a < float("inf"))
    old = tl.load(scale_ptr + b * stride_scale_b + n * stride_scale_n, mask=inside, other=1.0)
    fp8_max = tl.load(fp8_max_ptr + b * stride_fp8_max_b + n * stride_fp8_max_n, mask=inside, other=1.0)
    new = tl.minimum(tl.div_rn(fp8_max * margin_factor, tl.where(usable, a, 1.0)), LIMIT)
    tl.store(new_scale_ptr + b * N + n, tl.where(usable, new, old), mask=inside)


def update_scales(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: torch.Tensor,
    most_recent: bool,
    margin: float,
    *,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the histories rolled by one step and the scales that follow from them.

    A column whose staged amax (row 0) is 0 or not finite keeps its history and its scale.

    Args:
        amax_history: `(B, L, n)`, float32; row 0 holds the amaxes of this step.
        scale: `(B, n)`, float32.
        fp8_max: `(B, n)`, float32: the largest finite value of each column's format.
        most_recent: Whether the scale follows the last amax alone, not the largest of the window.
        margin: The scale is divided by 2^margin.
        tile: Launch configuration: `block_m` rows of the history by `block_n` columns.

    Returns:
        The new history `(B, L, n)`, row 0 cleared; the new scale `(B, n)`.
    """
    batch, length, columns = amax_history.shape
    new_history = torch.empty((batch, length, columns), dtype=torch.float32, device=amax_history.device)
    if amax_history.numel() == 0:
        return new_history, scale.clone(memory_format=torch.contiguous_format)
    new_scale = torch.empty((batch, columns), dtype=torch.float32, device=amax_history.device)
    tile = tile or tile_for("update_scales", length, columns, arch=arch_of(amax_history))
    update_scales_kernel[(batch * triton.cdiv(columns, tile.block_n),)](
        amax_history,
        scale,
        fp8_max,
        new_history,
        new_scale,
        length,
        columns,
        *amax_history.stride(),
        *scale.stride(),
        *fp8_max.stride(),
        2.0**-margin,
        MOST_RECENT=most_recent,
        LIMIT=FLOAT32_MAX,
        BLOCK_L=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return new_history, new_scale
