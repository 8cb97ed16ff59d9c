"""The product of two FP8 matrices with scales: of tensors, of rows, or of blocks of 128."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from scoped_fn.kernels._formats import BLOCK, block_shape, ceil_div
from scoped_fn.kernels._tiles import Tile, tile_for
from scoped_fn.kernels.gpu.launch import arch_of, has_tma, keeps_few_bits, processors
from scoped_fn.kernels.gpu.product import finished, scaled_block, store_in_parts, tile_of_product


@triton.jit
def scaled_mm_kernel(
    a_ptr,  # (B, M, K)
    b_ptr,  # (B, N, K)
    y_ptr,  # (B, M, N)
    bias_ptr,  # (B, N), or None
    scale_a_ptr,  # (B, Ra, Ca)
    scale_b_ptr,  # (B, Rb, Cb)
    M,
    N,
    K,
    stride_a_b,
    stride_a_m,
    stride_b_b,
    stride_b_n,
    stride_bias_b,
    stride_bias_n,
    stride_scale_a_b,
    stride_scale_a_r,
    stride_scale_a_c,
    stride_scale_b_b,
    stride_scale_b_r,
    stride_scale_b_c,
    SHARING_A: tl.constexpr,
    SHARING_B: tl.constexpr,
    SINGLE_B: tl.constexpr,
    BLOCKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    IMPRECISE: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Any batch, sizes and alignment: through pointers."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    first_m, first_n = tile_of_product(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, GROUP)
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end wrap around: what they give is not stored, and the loop needs no mask for them.
    a_ptrs = a_ptr + batch * stride_a_b + (m % M)[:, None].to(tl.int64) * stride_a_m + k[None, :]
    b_ptrs = b_ptr + batch * stride_b_b + (n % N)[None, :].to(tl.int64) * stride_b_n + k[:, None]
    scale_a_ptr += batch * stride_scale_a_b
    scale_b_ptr += batch * stride_scale_b_b
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=k[None, :] < K - start, other=0.0)
            b = tl.load(b_ptrs, mask=k[:, None] < K - start, other=0.0)
        if BLOCKED:
            sums += scaled_block(
                tl.dot(a, b),
                scale_a_ptr,
                scale_b_ptr,
                m,
                n,
                first_n,
                M,
                N,
                stride_scale_a_r,
                stride_scale_b_r,
                SHARING_A,
                SHARING_B,
                SINGLE_B,
            )
            scale_a_ptr += stride_scale_a_c
            scale_b_ptr += stride_scale_b_c
        elif SPLIT:
            sums += tl.dot(a, b, max_num_imprecise_acc=IMPRECISE)
        else:
            sums = tl.dot(a, b, sums)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    if bias_ptr is not None:
        bias_ptr += batch * stride_bias_b
    y = finished(
        sums,
        scale_a_ptr,
        scale_b_ptr,
        bias_ptr,
        m,
        n,
        M,
        N,
        stride_scale_a_r,
        stride_scale_b_r,
        stride_bias_n,
        SHARING_A,
        SHARING_B,
        BLOCKED,
    )
    # 64 bits for where the tile begins only: inside of it, they would take twice the registers.
    y_ptr += (batch * M + first_m) * N + first_n
    offsets = tl.arange(0, BLOCK_M)[:, None] * N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def scaled_mm_tma_kernel(
    a_desc,  # (M, K) in blocks of BLOCK_M by BLOCK_K
    b_desc,  # (N, K) in blocks of BLOCK_N by BLOCK_K
    y_desc,  # (M, N) in blocks of BLOCK_M by BLOCK_N / PARTS
    bias_ptr,  # (N,), or None
    scale_a_ptr,  # (Ra, Ca)
    scale_b_ptr,  # (Rb, Cb)
    M,
    N,
    K,
    stride_bias_n,
    stride_scale_a_r,
    stride_scale_a_c,
    stride_scale_b_r,
    stride_scale_b_c,
    SHARING_A: tl.constexpr,
    SHARING_B: tl.constexpr,
    SINGLE_B: tl.constexpr,
    BLOCKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    IMPRECISE: tl.constexpr,
    PARTS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """One matrix whose rows start at multiples of 16 bytes: as many programs as multiprocessors, each many tiles."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        first_m, first_n = tile_of_product(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        m = first_m + tl.arange(0, BLOCK_M)
        n = first_n + tl.arange(0, BLOCK_N)
        block_a_ptr = scale_a_ptr
        block_b_ptr = scale_b_ptr
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            a = a_desc.load([first_m, start])
            b = b_desc.load([first_n, start])
            if BLOCKED:
                sums += scaled_block(
                    tl.dot(a, b.T),
                    block_a_ptr,
                    block_b_ptr,
                    m,
                    n,
                    first_n,
                    M,
                    N,
                    stride_scale_a_r,
                    stride_scale_b_r,
                    SHARING_A,
                    SHARING_B,
                    SINGLE_B,
                )
                block_a_ptr += stride_scale_a_c
                block_b_ptr += stride_scale_b_c
            elif SPLIT:
                # A sum of its own for each 128 along K, added in float32. On Hopper IMPRECISE is None: a number would
                # do the same, but ptxas then waits for the tensor cores inside of the product. On Ada the compiler
                # would fold the addition into the product without it.
                sums += tl.dot(a, b.T, max_num_imprecise_acc=IMPRECISE)
            else:
                sums = tl.dot(a, b.T, sums)
        y = finished(
            sums,
            scale_a_ptr,
            scale_b_ptr,
            bias_ptr,
            m,
            n,
            M,
            N,
            stride_scale_a_r,
            stride_scale_b_r,
            stride_bias_n,
            SHARING_A,
            SHARING_B,
            BLOCKED,
        )
        store_in_parts(y_desc, y, first_m, first_n, BLOCK_M, BLOCK_N, PARTS)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    *,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Returns `(a * scale_a) @ (b * scale_b)^T + bias`, summed in float32 and rounded once.

    Args:
        a: `(B, M, K)`, FP8, any strides; copied where rows do not lie at multiples of 16 bytes, here and for b.
        b: `(B, N, K)`, FP8, of the same format or another.
        scale_a: `(B, Ra, Ca)`, float32, any strides: Ra is 1, M or `ceil(M / 128)`, Ca is 1 or `ceil(K / 128)`.
        scale_b: `(B, Rb, Cb)`, likewise with N.
        bias: `(B, N)`, any float dtype, any strides.
        out_dtype: float32, bfloat16 or float16.
        fast_accum: Whether Hopper and Ada may sum all of K in the tensor cores, which keep about 14 bits. Otherwise
            sums move to float32 every 128. Elsewhere, and with scales along K, there is no difference.
        tile: Launch configuration: `block_m` by `block_n` by `block_k`; `block_k` is 128 with scales along K.

    Returns:
        `(B, M, N)` of `out_dtype`.
    """
    batch, rows, inner = a.shape
    columns = b.shape[1]
    y = torch.empty((batch, rows, columns), dtype=out_dtype, device=a.device)
    if y.numel() == 0:
        return y
    if inner == 0:
        return y.zero_() if bias is None else y.copy_(bias[:, None, :])
    a, b = _aligned(a), _aligned(b)
    padded = a.shape[2]
    arch = arch_of(a)
    through_tma = has_tma(arch) and batch == 1 and _is_aligned(y)
    blocked = scale_a.shape[2] > 1 or scale_b.shape[2] > 1
    sums = "blocks" if blocked else "fast" if fast_accum else "split"
    variant = f"{sums} tma" if through_tma else sums
    tile = tile or tile_for("scaled_mm", rows, columns, variant=variant, arch=arch)
    sharing_a, stride_a = _row_sharing(a, scale_a)
    sharing_b, stride_b = _row_sharing(b, scale_b)
    options = {
        "SHARING_A": sharing_a,
        "SHARING_B": sharing_b,
        "SINGLE_B": stride_b == 0 or (sharing_b == BLOCK and BLOCK % tile.block_n == 0),
        "BLOCKED": blocked,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": tile.group,
        "SPLIT": not fast_accum,
        "IMPRECISE": tile.block_k if keeps_few_bits(arch) else None,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    scale_strides = (stride_a, _block_stride(scale_a)), (stride_b, _block_stride(scale_b))
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n)
    if through_tma:
        # A part of a tile of float32 takes as much shared memory as one of twice as many 16-bit columns.
        parts = tile.epilogue * out_dtype.itemsize // 2
        scaled_mm_tma_kernel[(min(tiles, processors(a)),)](
            TensorDescriptor.from_tensor(a[0], [tile.block_m, tile.block_k]),
            TensorDescriptor.from_tensor(b[0], [tile.block_n, tile.block_k]),
            TensorDescriptor.from_tensor(y[0], [tile.block_m, tile.block_n // parts]),
            None if bias is None else bias[0],
            scale_a,
            scale_b,
            rows,
            columns,
            padded,
            0 if bias is None else bias.stride(1),
            *scale_strides[0],
            *scale_strides[1],
            PARTS=parts,
            FLATTEN=not blocked,
            **options,
        )
    else:
        scaled_mm_kernel[(batch * tiles,)](
            a,
            b,
            y,
            bias,
            scale_a,
            scale_b,
            rows,
            columns,
            padded,
            *a.stride()[:2],
            *b.stride()[:2],
            *((0, 0) if bias is None else bias.stride()),
            scale_a.stride(0),
            *scale_strides[0],
            scale_b.stride(0),
            *scale_strides[1],
            EVEN_K=padded % tile.block_k == 0,
            **options,
        )
    return y


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether rows lie one after another, at multiples of 16 bytes, as descriptors and wide loads want them."""
    apart = x.stride(1) * x.itemsize
    return x.stride(2) == 1 and x.stride(1) >= x.shape[2] and apart % 16 == 0 and x.data_ptr() % 16 == 0


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """`x` with zeros up to a multiple of 16 columns: a copy, unless it is aligned. Loads of single bytes cost more."""
    batch, rows, columns = x.shape
    if columns % 16 == 0 and _is_aligned(x):
        return x
    padded = torch.zeros((batch, rows, ceil_div(columns, 16) * 16), dtype=x.dtype, device=x.device)
    padded[:, :, :columns] = x
    return padded


def _row_sharing(data: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
    """How many rows share a scale, and the stride from one scale to the next: 0 and 0 where all share one."""
    shared, _ = block_shape(data, scale)
    return (0, 0) if scale.shape[1] == 1 else (shared, scale.stride(1))


def _block_stride(scale: torch.Tensor) -> int:
    return 0 if scale.shape[2] == 1 else scale.stride(2)
