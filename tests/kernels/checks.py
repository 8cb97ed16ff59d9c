"""The comparisons of the kernels with the oracle: one for each operator, shared by all tests, the mutation check too.

Each takes the function to be checked first, which has the signature of the product's function of that name. Results
are compared bit for bit, NaN as NaN-ness; what the specification bounds is compared within the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import numpy as np
import torch

from scoped_fn import kernels
from tests.kernels import numpy_oracle as oracle
from tests.kernels.inputs import FORMATS

Function = Callable[..., Any]


def matrix(x: torch.Tensor) -> oracle.Array:
    """Its float32 values as one matrix (M, K): leading dimensions are rows, a vector is one row."""
    columns = x.shape[-1] if x.dim() else 1
    rows = x.shape[:-1].numel()
    return x.detach().contiguous().to(torch.float32).numpy().reshape(rows, columns)


def array(x: torch.Tensor) -> np.ndarray:
    """The same values for NumPy; fp8 as codes."""
    if x.dtype in FORMATS:
        return x.detach().contiguous().view(torch.uint8).numpy()
    return x.detach().float().numpy() if x.dtype in (torch.bfloat16, torch.float16) else x.detach().numpy()


def largest_of(x: torch.Tensor) -> np.float32:
    return oracle.LARGEST[str(x.dtype).removeprefix("torch.")]


def canonical(codes: oracle.Codes, fmt: oracle.Format) -> oracle.Codes:
    """All NaN codes as one."""
    return np.where(np.isnan(oracle.decode(codes, fmt)), np.uint8(fmt.nan_code), codes)


def assert_arrays_equal(actual: Any, expected: Any, what: str) -> None:
    """Same structure, dtypes, shapes and bits; NaN equals NaN, but -0 is not 0."""
    signs = [np.signbit(tree) if np.issubdtype(tree.dtype, np.floating) else tree for tree in (actual, expected)]
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected, custom_message=what)
    np.testing.assert_array_equal(actual, expected, err_msg=what)
    np.testing.assert_array_equal(*(np.where(np.isnan(expected), 0, sign) for sign in signs), err_msg=f"{what}: signs")


def assert_codes_equal(actual: torch.Tensor, expected: oracle.Codes, dtype: torch.dtype, what: str) -> None:
    assert actual.dtype == dtype, f"{what}: {actual.dtype}"
    assert actual.is_contiguous(), f"{what}: strides {actual.stride()}"
    fmt = FORMATS[dtype]
    codes = array(actual)
    chex.assert_shape(codes, expected.shape)
    assert_arrays_equal(canonical(codes, fmt), canonical(expected, fmt), what)


def assert_quantized(
    actual: kernels.Quantized, expected: oracle.Quantized, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Every field, bit for bit; data has the shape of x and the other fields those of the matrix."""
    assert_codes_equal(actual.data, expected.data.reshape(shape), dtype, "data")
    assert (actual.data_t is None) == (expected.data_t is None)
    if expected.data_t is not None:
        assert_codes_equal(actual.data_t, expected.data_t, dtype, "data_t")
    for name in ("amax", "scale_inv", "scale_inv_t"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), f"{name}: {ours}"
        if theirs is not None:
            assert_arrays_equal(array(ours), theirs, name)


def check_quantize(
    function: Function, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, transpose: bool = False
) -> kernels.Quantized:
    actual = function(x, scale, dtype, transpose=transpose)
    expected = oracle.quantize(matrix(x), scale.numpy(), FORMATS[dtype], transpose=transpose)
    assert_quantized(actual, expected, x.shape, dtype)
    return actual


def check_quantize_current(
    function: Function, x: torch.Tensor, dtype: torch.dtype, **options: Any
) -> kernels.Quantized:
    actual = function(x, dtype, **options)
    assert_quantized(actual, oracle.quantize_current(matrix(x), FORMATS[dtype], **options), x.shape, dtype)
    return actual


def check_quantize_blocks(function: Function, x: torch.Tensor, dtype: torch.dtype, **options: Any) -> kernels.Quantized:
    actual = function(x, dtype, **options)
    expected = oracle.quantize_blocks(matrix(x), FORMATS[dtype], largest=largest_of(x), **options)
    assert_quantized(actual, expected, x.shape, dtype)
    return actual


def check_quantize_mx(
    function: Function, x: torch.Tensor, dtype: torch.dtype, *, transpose: bool = False
) -> kernels.Quantized:
    actual = function(x, dtype, transpose=transpose)
    assert_quantized(actual, oracle.quantize_mx(matrix(x), FORMATS[dtype], transpose=transpose), x.shape, dtype)
    return actual


def check_dequantize(function: Function, q: kernels.Quantized, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The float32 product of value and scale, rounded once to the dtype asked for."""
    actual = function(q, out_dtype)
    assert actual.dtype == out_dtype
    assert actual.shape == q.data.shape
    codes = array(q.data).reshape(q.data.shape[:-1].numel(), q.data.shape[-1] if q.data.dim() else 1)
    wide = oracle.dequantize(codes, array(q.scale_inv), FORMATS[q.data.dtype])
    expected = torch.from_numpy(wide).to(out_dtype)
    assert_arrays_equal(array(actual), array(expected).reshape(q.data.shape), "dequantized")
    return actual


def check_update_scales(
    function: Function,
    history: torch.Tensor,
    scale: torch.Tensor,
    *,
    fp8_max: float | torch.Tensor,
    algorithm: str = "max",
    margin: float = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    actual = function(history, scale, fp8_max=fp8_max, algorithm=algorithm, margin=margin)
    maxima = np.broadcast_to(np.asarray(fp8_max, np.float32), scale.shape)
    expected = oracle.update_scales(
        history.numpy(), scale.numpy(), maxima, most_recent=algorithm == "most_recent", margin=margin
    )
    assert_arrays_equal(array(actual[0]), expected[0], "amax_history")
    assert_arrays_equal(array(actual[1]), expected[1], "scale")
    return actual


def check_quantize_nvfp4(
    function: Function,
    x: torch.Tensor,
    *,
    block_rows: int = 1,
    noise: torch.Tensor | None = None,
    transpose: bool = False,
) -> kernels.Quantized:
    """Codes are compared where the scale of their block is a number; where it is NaN they mean nothing."""
    q = function(x, block_rows=block_rows, noise=noise, transpose=transpose)
    options = {"block_rows": block_rows, "noise": None if noise is None else matrix(noise), "transpose": transpose}
    expected = oracle.quantize_nvfp4(matrix(x), **options)
    assert q.data.shape == x.shape
    assert_arrays_equal(array(q.amax), expected.amax, "amax")
    for suffix in ("", "_t") if transpose else ("",):
        data, scale = getattr(q, f"data{suffix}"), getattr(q, f"scale_inv{suffix}")
        codes, scales = getattr(expected, f"data{suffix}"), getattr(expected, f"scale_inv{suffix}")
        chex.assert_shape(array(scale), scales.shape)
        assert scale.dtype == torch.float8_e4m3fn
        ours = canonical(array(scale), oracle.E4M3)
        assert_arrays_equal(ours, canonical(scales, oracle.E4M3), f"scale_inv{suffix}")
        usable = ~np.isnan(oracle.spread(oracle.decode(scales, oracle.E4M3), block_rows, 16, codes.shape))
        four_bits = array(data).reshape(codes.shape)
        assert_arrays_equal(np.where(usable, four_bits, 0), np.where(usable, codes, 0), f"data{suffix}")
    assert (q.data_t is None) == (q.scale_inv_t is None) == (not transpose)
    return q


def operand(codes: np.ndarray, scale_inv: np.ndarray, dtype: torch.dtype) -> kernels.Quantized:
    """The first operand of a product; `.mT` of one with (N, K) codes is a second operand (K, N)."""
    data, scales = torch.from_numpy(codes.copy()).view(dtype), torch.from_numpy(np.array(scale_inv))
    return kernels.Quantized(data, None, None, scales, None)


def _wide(q: kernels.Quantized) -> np.ndarray:
    codes = array(q.data).reshape(q.data.shape[:-1].numel(), q.data.shape[-1])
    value = oracle.decode(codes, FORMATS[q.data.dtype]).astype(np.float64)
    return value * oracle.scale_at(array(q.scale_inv), codes.shape).astype(np.float64)


def check_scaled_mm(
    function: Function,
    a: kernels.Quantized,
    weight: kernels.Quantized,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> torch.Tensor:
    """`a` (..., K) times the transpose of `weight` (N, K), against the product in float64.

    A product of two fp8 values is exact in float32. A sum of K of them, in any order and scaled by blocks on the way,
    errs by at most (K + blocks + 6) units of 2^-24 relative to the sum of magnitudes; then comes one rounding to the
    dtype of the result.
    """
    actual = function(a, weight.mT, bias=bias, out_dtype=out_dtype, fast_accum=fast_accum)
    first, second = _wide(a), _wide(weight)
    shift = 0.0 if bias is None else bias.double().numpy()
    exact = first @ second.T + shift
    magnitude = np.abs(first) @ np.abs(second).T + np.abs(shift)
    k = first.shape[1]
    information = torch.finfo(out_dtype)
    bound = magnitude * (k + -(-k // 128) + 6) * 2.0**-24 + k * 2.0**-140
    # The bfloat16 instructions of CPUs give 0 for what is subnormal.
    subnormal = 1.0 if out_dtype == torch.bfloat16 else information.eps
    bound += (np.abs(exact) + bound) * information.eps / 2 + information.smallest_normal * subnormal
    assert actual.dtype == out_dtype
    assert actual.is_contiguous()
    chex.assert_shape(array(actual), (*a.data.shape[:-1], len(second)))
    result = array(actual).astype(np.float64).reshape(exact.shape)
    assert np.array_equal(np.isnan(result), np.isnan(exact))
    compared = np.abs(exact) <= information.max
    error = np.abs(result - exact, where=compared, out=np.zeros_like(exact))
    assert np.all(error <= np.where(compared, bound, 0)), f"error {error.max()} at {np.argwhere(error > bound)[:3]}"
    return actual


def _assert_within(q: kernels.Quantized, y: np.ndarray, bound: np.ndarray, scale: torch.Tensor) -> None:
    """Each value is one that a float32 result within `bound` of `y` can be cast to."""
    dtype = q.data.dtype
    lowest, highest = oracle.within(y, bound, scale.numpy(), FORMATS[dtype])
    value = oracle.decode(array(q.data), FORMATS[dtype]).reshape(y.shape)
    sure = np.abs(y) + bound < oracle.FLOAT32_MAX
    assert np.all((lowest <= value)[sure] & (value <= highest)[sure])
    # Beyond float32 it is infinite, which must show, as must NaN.
    lost = ~(np.abs(y) - bound <= float(oracle.FLOAT32_MAX) * (1 + 2.0**-23))
    assert np.all(np.isnan(value[lost])), "a value that is not finite must show as NaN"
    amax = np.max(np.abs(y), initial=0, where=~np.isnan(y))
    amax = np.inf if np.any(lost & ~np.isnan(y)) else amax
    slack = np.max(bound, initial=0, where=np.isfinite(bound)) + amax * 2.0**-23
    assert array(q.amax).dtype == np.float32
    chex.assert_shape(array(q.amax), ())
    assert float(q.amax) == amax or abs(float(q.amax) - amax) <= slack, f"amax {float(q.amax)}, expected {amax}"
    assert_arrays_equal(array(q.scale_inv), oracle.reciprocal(scale.numpy()), "scale_inv")


def _assert_copy(q: kernels.Quantized, transpose: bool) -> None:
    assert (q.data_t is not None) == transpose
    if transpose:
        codes = array(q.data).reshape(-1, q.data.shape[-1]) if q.data.numel() else None
        assert q.data_t.is_contiguous()
        if codes is None:
            chex.assert_shape(array(q.data_t), (q.data.shape[-1], q.data.shape[:-1].numel()))
        else:
            assert_codes_equal(q.data_t, codes.T, q.data.dtype, "data_t")


def _assert_close(
    actual: torch.Tensor, expected: np.ndarray, rtol: float, what: str, atol: np.ndarray | float = 0
) -> None:
    """A statistic of each row; what is not finite in float64 is not compared."""
    assert actual.dtype == torch.float32
    ours = array(actual).astype(np.float64)
    usable = np.isfinite(expected)
    assert ours.size == expected.size, f"{what}: {ours.shape}"
    error = np.abs(ours.reshape(expected.shape) - expected)
    assert np.all((error <= rtol * np.abs(expected) + atol)[usable]), what


def check_rms_norm_quantize(
    function: Function,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    eps: float = 1e-6,
    transpose: bool = False,
) -> kernels.Quantized:
    q, rstd = function(x, weight, scale, dtype, eps=eps, transpose=transpose)
    y, expected, bound = oracle.rms_norm(matrix(x), matrix(weight)[0], eps)
    chex.assert_shape(array(q.data), tuple(x.shape))
    _assert_within(q, y, bound, scale)
    _assert_copy(q, transpose)
    _assert_close(rstd, expected, (x.shape[-1] / 2 + 6) * 2.0**-24, "rstd")
    return q


def check_layer_norm_quantize(
    function: Function,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    eps: float = 1e-5,
    transpose: bool = False,
) -> kernels.Quantized:
    q, mean, rstd = function(x, weight, bias, scale, dtype, eps=eps, transpose=transpose)
    y, expected_mean, expected_rstd, bound = oracle.layer_norm(matrix(x), matrix(weight)[0], matrix(bias)[0], eps)
    chex.assert_shape(array(q.data), tuple(x.shape))
    _assert_within(q, y, bound, scale)
    _assert_copy(q, transpose)
    k = x.shape[-1]
    row = np.sum(np.abs(matrix(x).astype(np.float64)), axis=1) / max(k, 1)
    mean_error = (k + 2) * 2.0**-24 * row
    _assert_close(mean, expected_mean, 2.0**-24, "mean", mean_error)
    _assert_close(rstd, expected_rstd, (k + 12) * 2.0**-24, "rstd", (mean_error * expected_rstd) ** 2 * expected_rstd)
    return q


def check_silu_gate_quantize(
    function: Function,
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    transpose: bool = False,
) -> kernels.Quantized:
    q = function(gate, up, scale, dtype, transpose=transpose)
    y, bound = oracle.silu_gate(matrix(gate), matrix(up))
    chex.assert_shape(array(q.data), tuple(gate.shape))
    _assert_within(q, y, bound, scale)
    _assert_copy(q, transpose)
    return q
