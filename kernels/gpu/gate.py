"""The gate of a gated feed-forward layer, and the quantization that follows it, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scoped_fn.kernels._formats import FP8_MAX
from scoped_fn.kernels._tiles import Tile, tile_for
from scoped_fn.kernels.gpu.cast import amax_of, load_tile, raise_amax, saturating_cast, store_tile, tile_at
from scoped_fn.kernels.gpu.launch import arch_of, empty_quantized, rounds_first, wide


@triton.jit
def silu_gate_quantize_kernel(
    gate_ptr,  # (B, M, K)
    up_ptr,  # (B, M, K)
    scale_ptr,  # (B,)
    data_ptr,  # (B, M, K)
    data_t_ptr,  # (B, K, M)
    amax_ptr,  # (B,), zeros before
    M,
    K,
    stride_gate_b,
    stride_gate_m,
    stride_gate_k,
    stride_up_b,
    stride_up_m,
    stride_up_k,
    stride_scale_b,
    FP8_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program for a tile; one atomic operation for its amax."""
    b, first_m, first_k = tile_at(tl.program_id(0), M, K, BLOCK_M, BLOCK_K)
    gate = load_tile(
        gate_ptr + b * stride_gate_b, first_m, first_k, M, K, stride_gate_m, stride_gate_k, BLOCK_M, BLOCK_K, EVEN, WIDE
    )
    up = load_tile(
        up_ptr + b * stride_up_b, first_m, first_k, M, K, stride_up_m, stride_up_k, BLOCK_M, BLOCK_K, EVEN, WIDE
    )
    y = gate / (1.0 + tl.exp(-gate)) * up
    raise_amax(amax_ptr + b, amax_of(y))
    scale = tl.load(scale_ptr + b * stride_scale_b)
    data = saturating_cast(y, scale, data_ptr.dtype.element_ty, FP8_MAX, ROUND_FIRST)
    store_tile(data_ptr + b * M * K, data, first_m, first_k, M, K, BLOCK_M, BLOCK_K, EVEN, WIDE)
    if TRANSPOSE:
        store_tile(data_t_ptr + b * M * K, tl.trans(data), first_k, first_m, K, M, BLOCK_K, BLOCK_M, EVEN, WIDE)


def silu_gate_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    transpose: bool,
    *,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `silu(gate) * up`, computed in float32, in FP8; the same transposed; its amax.

    Args:
        gate: `(B, M, K)`, any strides.
        up: `(B, M, K)`, any strides.
        scale: `(B,)`, float32.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        transpose: Whether to write `data_t`.
        tile: Launch configuration: `block_m` by `block_k`.

    Returns:
        `data` `(B, M, K)`; `data_t` `(B, K, M)`, or `(B, 0, 0)` without `transpose`; `amax` `(B,)`, float32, of the
        result before it is scaled.
    """
    batch, rows, columns = gate.shape
    data, data_t = empty_quantized(gate, dtype, transpose)
    amax = torch.zeros((batch,), dtype=torch.float32, device=gate.device)
    if gate.numel() == 0:
        return data, data_t, amax
    arch = arch_of(gate)
    tile = tile or tile_for("silu_gate_quantize", rows, columns, variant="transpose" if transpose else "", arch=arch)
    silu_gate_quantize_kernel[(tile.count(batch, rows, columns),)](
        gate,
        up,
        scale,
        data,
        data_t,
        amax,
        rows,
        columns,
        *gate.stride(),
        *up.stride(),
        *scale.stride(),
        FP8_MAX=FP8_MAX[dtype],
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        TRANSPOSE=transpose,
        ROUND_FIRST=rounds_first(arch),
        EVEN=tile.divides(rows, columns),
        WIDE=wide(tile, rows, columns, gate, up),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return data, data_t, amax
