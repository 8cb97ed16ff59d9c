"""Steps that the kernels share: loads and stores of a tile, the saturating cast, amaxes, scales from them."""

import triton
import triton.language as tl


@triton.jit
def tile_at(program, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns the batch index (int64: it multiplies strides), the first row and the first column of a tile."""
    tiles_k = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_k
    return (program // tiles).to(tl.int64), program % tiles // tiles_k * BLOCK_M, program % tiles_k * BLOCK_K


@triton.jit
def offsets_in(BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, stride_m, stride_k, WIDE: tl.constexpr):
    """Returns offsets from the first element of a tile: in 32 bits, which spares registers, unless WIDE."""
    m = tl.arange(0, BLOCK_M)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    if WIDE:
        offsets = m.to(tl.int64) * stride_m + k.to(tl.int64) * stride_k
    else:
        offsets = m * stride_m + k * stride_k
    return offsets


@triton.jit
def inside(first_m, first_k, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns which elements of a tile are inside of an (M, K) matrix."""
    return (tl.arange(0, BLOCK_M)[:, None] < M - first_m) & (tl.arange(0, BLOCK_K)[None, :] < K - first_k)


@triton.jit
def load_tile(
    x_ptr,
    first_m,
    first_k,
    M,
    K,
    stride_m,
    stride_k,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Returns a tile of an (M, K) matrix in float32, 0 outside of it."""
    x_ptr += tl.cast(first_m, tl.int64) * stride_m + tl.cast(first_k, tl.int64) * stride_k
    x_ptrs = x_ptr + offsets_in(BLOCK_M, BLOCK_K, stride_m, stride_k, WIDE)
    if EVEN:
        x = tl.load(x_ptrs)
    else:
        x = tl.load(x_ptrs, mask=inside(first_m, first_k, M, K, BLOCK_M, BLOCK_K), other=0.0)
    return x.to(tl.float32)


@triton.jit
def store_tile(
    data_ptr,
    value,
    first_m,
    first_k,
    M,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Stores a tile of a contiguous (M, K) matrix."""
    data_ptr += tl.cast(first_m, tl.int64) * K + first_k
    data_ptrs = data_ptr + offsets_in(BLOCK_M, BLOCK_K, K, 1, WIDE)
    if EVEN:
        tl.store(data_ptrs, value)
    else:
        tl.store(data_ptrs, value, mask=inside(first_m, first_k, M, K, BLOCK_M, BLOCK_K))


@triton.jit
def rounded(x, FP8_MAX: tl.constexpr):
    """Returns `x` saturated and rounded to a number of the FP8 format, in float32, for casts that do neither right."""
    # Bits of the mantissa that go; the smallest normal number; the number whose last bit is worth the smallest
    # subnormal one, so that adding it rounds to that.
    DROPPED: tl.constexpr = 20 if FP8_MAX == 448.0 else 21
    NORMAL: tl.constexpr = 2.0**-6 if FP8_MAX == 448.0 else 2.0**-14
    SUBNORMALS: tl.constexpr = 1.5 * 2.0**14 if FP8_MAX == 448.0 else 1.5 * 2.0**7
    x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    bits = x.to(tl.int32, bitcast=True)
    odd = (bits >> DROPPED) & 1
    normal = (bits + ((1 << (DROPPED - 1)) - 1) + odd) & (-1 << DROPPED)
    subnormal = ((x + SUBNORMALS) - SUBNORMALS).to(tl.int32, bitcast=True) | (bits & (-1 << 31))
    nearest = tl.where(tl.abs(x) < NORMAL, subnormal, normal).to(tl.float32, bitcast=True)
    return tl.where(x == x, nearest, x)


@triton.jit
def saturating_cast(x, scale, FP8: tl.constexpr, FP8_MAX: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """Returns `x * scale` in FP8, finite `x` saturated, NaN where `x` is not finite."""
    scaled = x * scale
    if ROUND_FIRST:
        scaled = rounded(scaled, FP8_MAX)
    # `x * 0` is a zero of the sign of x, so that -0 stays, and NaN for NaN and inf: one FMA, where a test takes two
    # instructions more.
    return (scaled + x * 0.0).to(FP8)


@triton.jit
def amax_of(x):
    """Returns max |x| of a whole tile: NaN ignored, 0 where all are NaN."""
    a = tl.max(tl.abs(x))
    return tl.where(a == a, a, 0.0)


@triton.jit
def amax_along(x, axis: tl.constexpr):
    """Returns max |x| along one axis: NaN ignored, 0 where all are NaN."""
    a = tl.max(tl.abs(x), axis=axis)
    return tl.where(a == a, a, 0.0)


@triton.jit
def raise_amax(amax_ptr, a):
    """Sets `amax_ptr[0] = max(amax_ptr[0], a)`, both >= 0, where integers are in the order of their floats."""
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), a.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def scale_of(amax, epsilon, FP8_MAX: tl.constexpr, LIMIT: tl.constexpr, POWER_OF_2: tl.constexpr):
    """Returns the scale of a tensor or block from its amax, LIMIT where that overflows, and one over it."""
    a = tl.maximum(amax, epsilon)
    usable = (a > 0.0) & (a < float("inf"))
    scale = tl.where(usable, tl.div_rn(tl.zeros_like(a) + FP8_MAX, tl.where(usable, a, 1.0)), 1.0)
    scale = tl.where(scale == float("inf"), LIMIT, scale)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale, tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def e8m0_of(amax, ONE_OVER_FP8_MAX: tl.constexpr):
    """Returns the biased exponent (int32) of the power of two at or above `amax / FP8_MAX`, from 0 to 254."""
    bits = (amax * ONE_OVER_FP8_MAX).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    # 2^-127, exponent 0, is a subnormal float with half of the mantissa: up to there, rounding up stays at 0.
    above = (bits & 0x7FFFFF) > tl.where(exponent == 0, 0x400000, 0)
    return tl.minimum(exponent + above.to(tl.int32), 254)


@triton.jit
def power_of_2(exponent):
    """Returns 2^(exponent - 127) in float32 for exponents from 0 to 254; 0 stands for the subnormal 2^-127."""
    return tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
