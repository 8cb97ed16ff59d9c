"""What the kernels must compute, restated in NumPy from the specification alone: no line of it comes from the product.

Arrays stand for one matrix (M, K) of float32; codes are uint8. The direction of scale is `x_fp8 = saturate(x * scale)`,
`x ~ x_fp8 * scale_inv`. Slow and plain on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Codes = NDArray[np.uint8]

FLOAT32_MAX = np.float32(np.finfo(np.float32).max)
ONE = np.float32(1)
# Roundings of subnormal float32 numbers, in the bounds: four of the smallest.
TINIEST = 2.0**-147
# What a block's scale is when it would be infinite: the largest finite value of the dtype the input had.
LARGEST = {"float32": FLOAT32_MAX, "bfloat16": np.float32(3.3895313892515355e38), "float16": np.float32(65504)}


@dataclass(frozen=True)
class Format:
    """A small float: sign, exponent, mantissa, from the high bit to the low one."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int

    def magnitudes(self) -> NDArray[np.float64]:
        """The value of each code from 0 to the largest finite one."""
        exponent, mantissa = np.divmod(np.arange(self.max_code + 1), 2**self.mantissa_bits)
        significand = np.where(exponent == 0, mantissa, mantissa + 2**self.mantissa_bits)
        return significand * 2.0 ** (np.maximum(exponent, 1) - self.bias - self.mantissa_bits)

    @property
    def max(self) -> np.float32:
        return np.float32(self.magnitudes()[-1])


E4M3 = Format(exponent_bits=4, mantissa_bits=3, bias=7, max_code=0x7E, nan_code=0x7F)
E5M2 = Format(exponent_bits=5, mantissa_bits=2, bias=15, max_code=0x7B, nan_code=0x7F)
# It has no NaN: the scale of a block with an element that is not finite is NaN, and its codes mean nothing.
E2M1 = Format(exponent_bits=2, mantissa_bits=1, bias=1, max_code=0x7, nan_code=0x7)


class Quantized(NamedTuple):
    """One matrix in fp8, as the product's tuple of the same name."""

    data: Codes
    data_t: Codes | None
    amax: Array | None
    scale_inv: NDArray[np.generic]
    scale_inv_t: NDArray[np.generic] | None


@np.errstate(invalid="ignore")
def encode(x: Array, fmt: Format) -> Codes:
    """The nearest code, the even one at a tie, the largest finite one beyond the range; NaN for NaN."""
    table = fmt.magnitudes()
    midpoints = (table[:-1] + table[1:]) / 2
    magnitude = np.abs(np.asarray(x, np.float64))
    code = np.searchsorted(midpoints, magnitude, side="left")
    tie = magnitude == np.append(midpoints, np.inf)[np.minimum(code, fmt.max_code)]
    code = np.minimum(code + (tie & (code % 2 == 1)), fmt.max_code)
    code = np.where(np.isnan(x), fmt.nan_code, code)
    return (code + (np.signbit(x) << (fmt.exponent_bits + fmt.mantissa_bits))).astype(np.uint8)


def decode(codes: Codes, fmt: Format) -> Array:
    """The value of each code; NaN for what lies above the largest finite one (E5M2's infinities apart)."""
    sign_bit = 2 ** (fmt.exponent_bits + fmt.mantissa_bits)
    values = np.full(sign_bit, np.nan)
    values[: fmt.max_code + 1] = fmt.magnitudes()
    if fmt == E5M2:
        values[fmt.max_code + 1] = np.inf
    return np.concatenate([values, -values]).astype(np.float32)[codes]


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def saturate(x: Array, scale: Array | np.float32, fmt: Format) -> Codes:
    """`x * scale` in float32, then the code: finite values saturate, others become NaN."""
    return encode(np.where(np.isfinite(x), x * scale, np.float32(np.nan)), fmt)


def amax(x: Array) -> np.float32:
    """The largest magnitude; NaN does not count, infinity does; 0 of nothing."""
    magnitude = np.abs(x)
    return np.float32(np.max(magnitude[~np.isnan(magnitude)], initial=0))


@np.errstate(divide="ignore", over="ignore", under="ignore")
def scale_of(
    amax: Array, fmt: Format, *, epsilon: float = 0.0, power_of_2: bool = False, largest: np.float32 = FLOAT32_MAX
) -> Array:
    """The scale that brings `amax` to the largest value of the format; 1 where there is none."""
    amax = np.maximum(np.asarray(amax, np.float32), np.float32(epsilon))
    usable = (amax > 0) & (amax < np.inf)
    exact = np.where(usable, fmt.max / np.where(usable, amax, ONE), ONE)
    exact = np.where(np.isinf(exact), largest, exact).astype(np.float32)
    if power_of_2:
        _, exponent = np.frexp(exact)
        exact = np.ldexp(ONE, exponent - 1).astype(np.float32)
    return exact


@np.errstate(under="ignore", divide="ignore", over="ignore")
def reciprocal(scale: Array) -> Array:
    return np.asarray(ONE / scale, np.float32)


def quantize(x: Array, scale: Array, fmt: Format, *, transpose: bool = False) -> Quantized:
    """With a scale for the tensor, (), or one for each row, (M, 1)."""
    data = saturate(x, scale, fmt)
    scale_inv = reciprocal(scale)
    return Quantized(
        data, data.T if transpose else None, np.asarray(amax(x)), scale_inv, scale_inv.T if transpose else None
    )


def quantize_current(
    x: Array, fmt: Format, *, power_of_2: bool = False, epsilon: float = 0.0, transpose: bool = False
) -> Quantized:
    """With the scale that the tensor's own amax gives."""
    return quantize(x, scale_of(amax(x), fmt, epsilon=epsilon, power_of_2=power_of_2), fmt, transpose=transpose)


def block_amax(x: Array, rows: int, columns: int) -> Array:
    """The amax of each block of a matrix; blocks at the edges may be smaller."""
    m, k = x.shape
    starts = [(i, j) for i in range(0, m, rows) for j in range(0, k, columns)]
    blocks = [amax(x[i : i + rows, j : j + columns]) for i, j in starts]
    return np.array(blocks, np.float32).reshape(-(-m // rows), -(-k // columns))


def spread(scale: NDArray[np.generic], rows: int, columns: int, shape: tuple[int, int]) -> NDArray[np.generic]:
    """Each block's scale at each of its elements."""
    return scale.repeat(rows, axis=0).repeat(columns, axis=1)[: shape[0], : shape[1]]


def _blocks(
    x: Array, fmt: Format, rows: int, *, power_of_2: bool, epsilon: float, largest: np.float32
) -> tuple[Codes, Array]:
    scale = scale_of(block_amax(x, rows, 128), fmt, epsilon=epsilon, power_of_2=power_of_2, largest=largest)
    return saturate(x, spread(scale, rows, 128, x.shape), fmt), reciprocal(scale)


def quantize_blocks(
    x: Array,
    fmt: Format,
    *,
    block_rows: int = 1,
    power_of_2: bool = True,
    epsilon: float = 0.0,
    transpose: bool = False,
    largest: np.float32 = FLOAT32_MAX,
) -> Quantized:
    """1x128 blocks, where the transposed copy is quantized on its own, or 128x128 ones, where it is a copy."""
    data, scale_inv = _blocks(x, fmt, block_rows, power_of_2=power_of_2, epsilon=epsilon, largest=largest)
    if not transpose:
        return Quantized(data, None, None, scale_inv, None)
    if block_rows == 128:
        return Quantized(data, data.T, None, scale_inv, scale_inv.T)
    data_t, scale_inv_t = _blocks(x.T, fmt, 1, power_of_2=power_of_2, epsilon=epsilon, largest=largest)
    return Quantized(data, data_t, None, scale_inv, scale_inv_t)


@np.errstate(over="ignore", under="ignore")
def e8m0(amax: Array, fmt: Format) -> Codes:
    """The smallest byte whose power of two, 2^(byte - 127), brings `amax` into the range of the format."""
    ratio = np.asarray(amax, np.float32) * np.float32(1 / np.float64(fmt.max))
    powers = 2.0 ** (np.arange(255) - 127)
    byte = np.minimum(np.searchsorted(powers, np.asarray(ratio, np.float64), side="left"), 254)
    return np.where(np.isnan(ratio), 255, byte).astype(np.uint8)


def power_of(byte: Codes) -> Array:
    """The factor that a scale byte stands for."""
    return np.where(byte == 255, np.nan, 2.0 ** (byte.astype(np.float64) - 127)).astype(np.float32)


def _mx(x: Array, fmt: Format) -> tuple[Codes, Codes]:
    byte = e8m0(block_amax(x, 1, 32), fmt)
    scale = (2.0 ** (127 - byte.astype(np.float64))).astype(np.float32)
    return saturate(x, spread(scale, 1, 32, x.shape), fmt), byte


def quantize_mx(x: Array, fmt: Format, *, transpose: bool = False) -> Quantized:
    """Blocks of 32 along the rows; the transposed copy is quantized on its own."""
    data, scale = _mx(x, fmt)
    data_t, scale_t = _mx(x.T, fmt) if transpose else (None, None)
    return Quantized(data, data_t, None, scale, scale_t)


def scale_at(scale_inv: NDArray[np.generic], shape: tuple[int, int]) -> Array:
    """The factor of each element, by the shape and dtype of the scales: E8M0, or per tensor, row or block of 128."""
    (m, k), scale = shape, scale_inv
    if scale.dtype == np.uint8:
        return spread(power_of(scale), 1, 32, shape)
    scale = scale.reshape(1, 1) if scale.ndim == 0 else scale
    rows = m if scale.shape[0] == 1 else 1 if scale.shape[0] == m else 128
    return spread(scale, max(rows, 1), max(k, 1) if scale.shape[1] == 1 else 128, shape)


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def dequantize(data: Codes, scale_inv: NDArray[np.generic], fmt: Format) -> Array:
    return decode(data, fmt) * scale_at(scale_inv, data.shape)


@np.errstate(over="ignore", under="ignore", divide="ignore")
def update_scales(
    history: Array, scale: Array, fp8_max: Array, *, most_recent: bool = False, margin: float = 0
) -> tuple[Array, Array]:
    """Rolls each column that has a finite amax in its staging row 0, and takes its scale from the last L amaxes."""
    history, scale = history.copy(), scale.copy()
    for column in range(history.shape[1]):
        last = history[0, column]
        history[0, column] = 0
        if last == 0 or not np.isfinite(last):
            continue
        window = np.append(history[1:, column], last)
        history[1:, column] = window[1:]
        amax = last if most_recent else np.max(window[~np.isnan(window)])
        if amax != 0 and np.isfinite(amax):
            scaled_max = fp8_max[column] * np.float32(2.0**-margin)
            scale[column] = np.minimum(scaled_max / amax, FLOAT32_MAX)
    return history, scale


@np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")
def nvfp4_scale(amax: np.float32) -> np.float32:
    """The scale of a tensor: it brings the largest magnitude to 448 * 6; 1 where there is none to bring."""
    usable = amax > 0 and np.isfinite(amax)
    return np.minimum(np.float32(448 * 6) / amax, FLOAT32_MAX) if usable else ONE


def stochastic(x: Array, noise: Array, fmt: Format) -> Codes:
    """The code above where the noise is below the remainder, else the one below; by magnitude, so towards zero."""
    table = fmt.magnitudes()
    magnitude = np.minimum(np.abs(x).astype(np.float64), table[-1])
    below = np.searchsorted(table, magnitude, side="right") - 1
    above = np.minimum(below + 1, fmt.max_code)
    up = noise * (table[above] - table[below]) < magnitude - table[below]
    sign = np.signbit(x) << (fmt.exponent_bits + fmt.mantissa_bits)
    return (np.where(up, above, below) + sign).astype(np.uint8)


@np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")
def _nvfp4(x: Array, rows: int, whole: np.float32, noise: Array | None) -> tuple[Codes, Codes]:
    ratio = block_amax(x, rows, 16) * (whole / np.float32(6))
    finite = block_amax(np.where(np.isfinite(x), np.float32(0), np.float32(np.inf)), rows, 16) == 0
    scale = np.where(finite, encode(ratio, E4M3), E4M3.nan_code).astype(np.uint8)
    factor = np.minimum(ONE / (decode(scale, E4M3) * (ONE / whole)), FLOAT32_MAX)
    scaled = x * spread(factor, rows, 16, x.shape)
    return encode(scaled, E2M1) if noise is None else stochastic(scaled, noise, E2M1), scale


def quantize_nvfp4(x: Array, *, block_rows: int = 1, noise: Array | None = None, transpose: bool = False) -> Quantized:
    """Codes of four bits, one a byte, and E4M3 codes of the scales of blocks of 16 or 16x16."""
    largest = amax(x)
    whole = nvfp4_scale(largest)
    data, scale = _nvfp4(x, block_rows, whole, noise)
    if not transpose:
        return Quantized(data, None, np.asarray(largest), scale, None)
    if block_rows == 16:
        return Quantized(data, data.T, np.asarray(largest), scale, scale.T)
    data_t, scale_t = _nvfp4(x.T, 1, whole, None if noise is None else noise.T)
    return Quantized(data, data_t, np.asarray(largest), scale, scale_t)


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def dequantize_nvfp4(data: Codes, scale: Codes, amax: Array) -> Array:
    rows = 1 if len(scale) == len(data) else 16
    factor = decode(scale, E4M3) * (ONE / nvfp4_scale(np.float32(amax)))
    return decode(data, E2M1) * spread(factor, rows, 16, data.shape)


def hadamard(size: int = 16) -> Array:
    """By its definition: the sign of an entry is the parity of the bits that its row and column share."""
    parity = [[(row & column).bit_count() % 2 for column in range(size)] for row in range(size)]
    return ((1 - 2 * np.array(parity)) / np.sqrt(size)).astype(np.float32)


def rms_norm(
    x: Array, weight: Array, epsilon: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """In float64: the normalized x, 1 / root mean square, and a bound on a float32 computation's error in the first."""
    wide, gain = x.astype(np.float64), weight.astype(np.float64)
    k = x.shape[1]
    rstd = 1 / np.sqrt(np.sum(wide**2, axis=1) / max(k, 1) + epsilon)
    y = wide * rstd[:, None] * gain
    # A sum of K terms errs by K units in the last place at most, its square root by half as many.
    return y, rstd, np.abs(y) * (k / 2 + 8) * 2.0**-24 + TINIEST * (1 + np.abs(gain))


def layer_norm(
    x: Array, weight: Array, bias: Array, epsilon: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """In float64: the normalized x, mean, 1 / deviation, and a bound on a float32 computation's error in the first."""
    wide, gain, shift = x.astype(np.float64), weight.astype(np.float64), bias.astype(np.float64)
    k = max(x.shape[1], 1)
    mean = np.sum(wide, axis=1) / k
    centred = wide - mean[:, None]
    variance = np.sum(centred**2, axis=1) / k
    rstd = 1 / np.sqrt(variance + epsilon)
    y = centred * rstd[:, None] * gain + shift
    unit = 2.0**-24
    mean_error = (k + 2) * unit * np.sum(np.abs(wide), axis=1) / k
    relative = (k + 12) * unit + mean_error**2 / (variance + epsilon)
    bound = np.abs(gain) * rstd[:, None] * (mean_error[:, None] + np.abs(centred) * relative[:, None])
    return y, mean, rstd, bound + 2 * unit * (np.abs(y) + np.abs(shift)) + TINIEST * (1 + np.abs(gain))


@np.errstate(over="ignore", under="ignore")
def silu_gate(gate: Array, up: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """In float64: `gate * sigmoid(gate) * up`, and a bound on a float32 computation's error in it."""
    wide, factor = gate.astype(np.float64), up.astype(np.float64)
    y = wide / (1 + np.exp(-wide)) * factor
    # Below about -88 the sigmoid is subnormal or zero in float32.
    lost = np.where(wide < -80, np.abs(wide) * 2.0**-126 * np.abs(factor), 0)
    return y, np.abs(y) * 16 * 2.0**-24 + lost + TINIEST * (1 + np.abs(factor))


def within(y: NDArray[np.float64], bound: NDArray[np.float64], scale: Array, fmt: Format) -> tuple[Array, Array]:
    """The smallest and the largest fp8 values that a float32 result within `bound` of `y` may have after the cast."""
    low, high = (np.clip(y + side * bound, -FLOAT32_MAX, FLOAT32_MAX) * np.float64(scale) for side in (-1.0, 1.0))
    unit = 2.0**-23
    widened = low - np.abs(low) * unit, high + np.abs(high) * unit
    clipped = (np.clip(side, -fmt.max, fmt.max).astype(np.float32) for side in widened)
    lowest, highest = (decode(encode(side, fmt), fmt) for side in clipped)
    return lowest, highest
