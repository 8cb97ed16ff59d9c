"""Steps of a product of two matrices with scales: which tile, the scales of a block, what follows the sum."""

import triton
import triton.language as tl


@triton.jit
def tile_of_product(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Returns the first row and column of a tile: GROUP rows of tiles are walked column by column."""
    in_group = GROUP * tl.cdiv(N, BLOCK_N)
    first = tile // in_group * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    return (first + tile % in_group % height) * BLOCK_M, tile % in_group // height * BLOCK_N


@triton.jit
def scales_of(scale_ptr, row, rows, stride, SHARING: tl.constexpr):
    """Returns the scales of rows `row`, where SHARING of them share one, or all do, with stride 0."""
    if SHARING > 1:
        row = row // SHARING
        rows = tl.cdiv(rows, SHARING)
    return tl.load(scale_ptr + row.to(tl.int64) * stride, mask=row < rows, other=0.0)


@triton.jit
def scaled_block(
    product,  # (BLOCK_M, BLOCK_N), of one block along K
    scale_a_ptr,  # at the block
    scale_b_ptr,  # at the block
    m,
    n,
    first_n,
    M,
    N,
    stride_a,
    stride_b,
    SHARING_A: tl.constexpr,
    SHARING_B: tl.constexpr,
    SINGLE_B: tl.constexpr,  # whether one scale of b serves the tile
):
    """Returns `product * scale_a * scale_b`."""
    scale_a = scales_of(scale_a_ptr, m, M, stride_a, SHARING_A)
    if SINGLE_B:
        scaled = product * (scale_a * tl.load(scale_b_ptr + first_n // 128 * stride_b))[:, None]
    else:
        scaled = product * scale_a[:, None] * scales_of(scale_b_ptr, n, N, stride_b, SHARING_B)[None, :]
    return scaled


@triton.jit
def finished(
    sums,  # (BLOCK_M, BLOCK_N)
    scale_a_ptr,
    scale_b_ptr,
    bias_ptr,  # (N,) or None
    m,
    n,
    M,
    N,
    stride_a,
    stride_b,
    stride_bias,
    SHARING_A: tl.constexpr,
    SHARING_B: tl.constexpr,
    BLOCKED: tl.constexpr,  # whether the sums are scaled already
):
    """Returns the sums scaled, with the bias."""
    if not BLOCKED:
        if SHARING_A == 0:
            sums = sums * tl.load(scale_a_ptr)
        else:
            sums = sums * scales_of(scale_a_ptr, m, M, stride_a, SHARING_A)[:, None]
        if SHARING_B == 0:
            sums = sums * tl.load(scale_b_ptr)
        else:
            sums = sums * scales_of(scale_b_ptr, n, N, stride_b, SHARING_B)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n.to(tl.int64) * stride_bias, mask=n < N, other=0.0)
        sums = sums + bias.to(tl.float32)[None, :]
    return sums


@triton.jit
def halves(x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(x, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def store_in_parts(y_desc, y, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    """Stores a tile through shared memory of a PARTS-th of its size; PARTS is 1, 2 or 4."""
    tl.static_assert(PARTS <= 4)
    if PARTS == 1:
        y_desc.store([m, n], y.to(y_desc.dtype))
    else:
        left, right = halves(y, BLOCK_M, BLOCK_N)
        if PARTS == 2:
            y_desc.store([m, n], left.to(y_desc.dtype))
            y_desc.store([m, n + BLOCK_N // 2], right.to(y_desc.dtype))
        else:
            first, second = halves(left, BLOCK_M, BLOCK_N // 2)
            third, fourth = halves(right, BLOCK_M, BLOCK_N // 2)
            y_desc.store([m, n], first.to(y_desc.dtype))
            y_desc.store([m, n + BLOCK_N // 4], second.to(y_desc.dtype))
            y_desc.store([m, n + BLOCK_N // 2], third.to(y_desc.dtype))
            y_desc.store([m, n + 3 * BLOCK_N // 4], fourth.to(y_desc.dtype))
