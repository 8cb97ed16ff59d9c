"""`quantize`, `quantize_current` and `dequantize` with a scale of the tensor or of each row, against the oracle."""

from __future__ import annotations

import copy

import chex
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn import kernels
from tests.helpers import assert_disjoint
from tests.kernels import checks, inputs
from tests.kernels import numpy_oracle as oracle

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = st.sampled_from(inputs.FP8)
SCALES = (1.0, 0.375, 3.5, 448.0, 1e-3, 2.0**-40, 2.0**60, 1e-38, 1e-45, 3.4028234663852886e38)


def _row_scales(x: torch.Tensor, seed: int) -> torch.Tensor:
    rows = x.shape[:-1].numel()
    wide = np.random.default_rng(seed).standard_normal((rows, 1))
    return torch.from_numpy(np.exp(4 * wide).astype(np.float32))


@given(x=inputs.tensors(), scale=st.sampled_from(SCALES), dtype=FP8, transpose=st.booleans())
def test_a_scale_of_the_tensor(x: torch.Tensor, scale: float, dtype: torch.dtype, transpose: bool) -> None:
    checks.check_quantize(kernels.quantize, x, torch.tensor(scale), dtype, transpose=transpose)


@given(x=inputs.tensors(), seed=inputs.SEEDS, dtype=FP8, transpose=st.booleans())
def test_a_scale_of_each_row(x: torch.Tensor, seed: int, dtype: torch.dtype, transpose: bool) -> None:
    checks.check_quantize(kernels.quantize, x, _row_scales(x, seed), dtype, transpose=transpose)


@given(
    x=inputs.tensors(),
    dtype=FP8,
    power_of_2=st.booleans(),
    epsilon=st.sampled_from([0.0, 1e-6, 1.0, 1e30]),
    transpose=st.booleans(),
)
def test_the_scale_that_the_tensor_itself_gives(
    x: torch.Tensor, dtype: torch.dtype, power_of_2: bool, epsilon: float, transpose: bool
) -> None:
    options = {"power_of_2": power_of_2, "epsilon": epsilon, "transpose": transpose}
    checks.check_quantize_current(kernels.quantize_current, x, dtype, **options)


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (0,), (0, 3), (3, 0), (2, 0, 4), (1, 1), (3, 5), (2, 1, 3, 33)], ids=str
)
@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_shapes_and_layouts(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    x = inputs.lay_out(inputs.values(shape, torch.bfloat16, "normal", 1), layout)
    checks.check_quantize(kernels.quantize, x, torch.tensor(2.5), dtype, transpose=True)
    checks.check_quantize(kernels.quantize, x, _row_scales(x, 2), dtype, transpose=True)
    checks.check_quantize_current(kernels.quantize_current, x, dtype, transpose=True)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_every_bfloat16_value(dtype: torch.dtype, scale: float) -> None:
    checks.check_quantize(kernels.quantize, inputs.every_bfloat16(), torch.tensor(scale), dtype)


@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_every_float16_value(dtype: torch.dtype) -> None:
    x = inputs.every_bfloat16().view(torch.float16)
    checks.check_quantize(kernels.quantize, x, torch.tensor(1.0), dtype)
    checks.check_quantize(kernels.quantize, x, torch.tensor(0.375), dtype)


@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_values_at_and_beside_each_rounding_boundary(dtype: torch.dtype) -> None:
    x = torch.from_numpy(inputs.tie_values()).reshape(1, -1)
    checks.check_quantize(kernels.quantize, x, torch.tensor(1.0), dtype)


@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (311,), (7, 11), (7, 5, 3), (2, 3, 5, 3)], ids=str)
@pytest.mark.parametrize("scale", [0.375, 1.0, 3.5])
@pytest.mark.parametrize("x_dtype", inputs.DTYPES, ids=str)
def test_round_trip_is_within_the_precision_of_the_format(
    shape: tuple[int, ...], scale: float, dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    x = (torch.rand(shape) * 2 - 1).to(x_dtype)
    back = kernels.dequantize(kernels.quantize(x, torch.tensor(scale), dtype), x_dtype)
    relative, absolute = {torch.float8_e4m3fn: (0.125, 0.0675), torch.float8_e5m2: (0.25, 0.125)}[dtype]
    torch.testing.assert_close(back, x, rtol=relative, atol=absolute)


@given(x=inputs.tensors(kinds=("normal", "ties", "zeros")), dtype=FP8, row_wise=st.booleans(), seed=inputs.SEEDS)
def test_quantizing_what_was_dequantized_changes_nothing(
    x: torch.Tensor, dtype: torch.dtype, row_wise: bool, seed: int
) -> None:
    # With powers of two the round trip is exact; with another scale it errs by less than half a step.
    scale = _row_scales(x, seed) if row_wise else torch.tensor(3.5)
    first = kernels.quantize(x, scale, dtype)
    second = kernels.quantize(kernels.dequantize(first), scale, dtype)
    checks.assert_codes_equal(second.data, checks.array(first.data), dtype, "data")


@given(x=inputs.tensors(), dtype=FP8, out=st.sampled_from(inputs.DTYPES), row_wise=st.booleans(), seed=inputs.SEEDS)
def test_dequantize(x: torch.Tensor, dtype: torch.dtype, out: torch.dtype, row_wise: bool, seed: int) -> None:
    scale = _row_scales(x, seed) if row_wise else torch.tensor(0.3)
    checks.check_dequantize(kernels.dequantize, kernels.quantize(x, scale, dtype), out)


@pytest.mark.parametrize("scale_inv", [1.0, 0.3, 2.0**-130, 1e30, 3.4028234663852886e38])
@pytest.mark.parametrize("out", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_dequantize_every_code(dtype: torch.dtype, out: torch.dtype, scale_inv: float) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    q = checks.operand(codes, np.float32(scale_inv), dtype)
    checks.check_dequantize(kernels.dequantize, q, out)


def test_dequantize_gives_float32_unless_told_otherwise() -> None:
    q = kernels.quantize(torch.ones(2, 3), torch.tensor(4.0), torch.float8_e4m3fn)
    assert kernels.dequantize(q).dtype == torch.float32
    assert kernels.dequantize(q).eq(1).all()


@given(x=inputs.tensors(min_dims=1), dtype=FP8)
def test_dequantize_of_the_transposed_copy(x: torch.Tensor, dtype: torch.dtype) -> None:
    q = kernels.quantize(x, torch.tensor(0.3), dtype, transpose=True)
    rows = kernels.dequantize(q).reshape(x.shape[:-1].numel(), x.shape[-1])
    torch.testing.assert_close(kernels.dequantize(q.mT), rows.mT, rtol=0, atol=0, equal_nan=True)


def test_minus_zero_stays_and_what_is_not_finite_shows_as_nan() -> None:
    x = torch.tensor([[-0.0, 0.0, torch.nan, torch.inf, -torch.inf, 1e38, -1e38]])
    for dtype in inputs.FP8:
        q = kernels.quantize(x, torch.tensor(1e38), dtype)
        value = kernels.dequantize(kernels.Quantized(q.data, None, None, torch.tensor(1.0), None))
        largest = torch.finfo(dtype).max
        assert value.isnan().tolist() == [[False, False, True, True, True, False, False]]
        assert value[0, [0, 1, 5, 6]].tolist() == [0, 0, largest, -largest]
        assert torch.signbit(value[0, :2]).tolist() == [True, False]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0.0),
        ([torch.nan, torch.nan], 0.0),
        ([torch.nan, -3.0, 2.0], 3.0),
        ([-torch.inf, 5.0, torch.nan], torch.inf),
        ([-0.0], 0.0),
        ([1e-45], 1e-45),
    ],
)
def test_amax_ignores_nan_keeps_infinity_and_is_zero_of_nothing(values: list[float], expected: float) -> None:
    q = kernels.quantize(torch.tensor([values]), torch.tensor(7.0), torch.float8_e4m3fn)
    checks.assert_arrays_equal(checks.array(q.amax), np.array(expected, np.float32), "amax")


def test_the_transposed_copy_of_many_dimensions_is_that_of_the_matrix() -> None:
    x = torch.randn(2, 3, 5)
    q = kernels.quantize(x, torch.tensor(1.0), torch.float8_e5m2, transpose=True)
    chex.assert_shape(checks.array(q.data_t), (5, 6))
    np.testing.assert_array_equal(checks.array(q.data_t), checks.array(q.data).reshape(6, 5).T)


@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (2, 3, 5), (2, 0, 5), (2, 5, 0)], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_mt_swaps_the_two_copies_and_their_scales(shape: tuple[int, ...], transpose: bool) -> None:
    x = torch.randn(shape)
    q = kernels.quantize(x, _row_scales(x, 1), torch.float8_e4m3fn, transpose=transpose)
    rows = checks.array(q.data).reshape(checks.matrix(x).shape)
    for twin, data, scale_inv in ((q.mT, rows.T, q.scale_inv.mT), (q.mT.mT, rows, q.scale_inv)):
        np.testing.assert_array_equal(checks.array(twin.data), data)
        np.testing.assert_array_equal(checks.array(twin.data_t), data.T)
        np.testing.assert_array_equal(twin.scale_inv, scale_inv)
        np.testing.assert_array_equal(twin.scale_inv_t, scale_inv.mT)
        assert twin.amax is q.amax


@pytest.mark.parametrize("transpose", [False, True])
def test_mt_is_a_view(transpose: bool) -> None:
    q = kernels.quantize(torch.randn(3, 5), torch.tensor(1.0), torch.float8_e4m3fn, transpose=transpose)
    assert q.mT.data.data_ptr() == (q.data_t if transpose else q.data).data_ptr()
    assert q.mT.data_t.data_ptr() == q.data.data_ptr()


@given(x=inputs.tensors(), dtype=FP8)
def test_inputs_stay_and_outputs_are_new_memory(x: torch.Tensor, dtype: torch.dtype) -> None:
    scale = torch.tensor(1.0)
    before = copy.deepcopy((x, scale))
    q = kernels.quantize(x, scale, dtype, transpose=True)
    current = kernels.quantize_current(x, dtype, transpose=True)
    again = kernels.dequantize(q)
    kernels.dequantize(q, torch.bfloat16)
    checks.assert_arrays_equal(checks.array(x), checks.array(before[0]), "x")
    checks.assert_arrays_equal(checks.array(scale), checks.array(before[1]), "scale")
    assert_disjoint(x, scale, q.data, q.data_t, q.amax, q.scale_inv, again)
    assert_disjoint(x, current.data, current.data_t, current.amax, current.scale_inv)


@given(seed=inputs.SEEDS, dtype=FP8)
def test_a_power_of_two_is_the_largest_below_the_exact_scale(seed: int, dtype: torch.dtype) -> None:
    x = inputs.any_bits((64,), torch.float32, np.random.default_rng(seed))
    for one in x[x.isfinite() & (x.abs() > 1e-30)]:
        exact, power = (1 / float(kernels.quantize_current(one, dtype, power_of_2=p).scale_inv) for p in (False, True))
        assert power <= exact * (1 + 2.0**-22)
        assert exact < 2 * power * (1 + 2.0**-22)


@given(seed=inputs.SEEDS, dtype=FP8)
def test_scaling_by_a_power_of_two_changes_only_the_scale(seed: int, dtype: torch.dtype) -> None:
    x = inputs.values((5, 33), torch.float32, "normal", seed)
    one, other = (kernels.quantize_current(factor * x, dtype) for factor in (1.0, 2.0**-20))
    np.testing.assert_array_equal(checks.array(one.data), checks.array(other.data))
    assert float(other.scale_inv) == float(one.scale_inv) * 2.0**-20


@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
@pytest.mark.parametrize("x_dtype", inputs.DTYPES, ids=str)
def test_a_scale_is_the_reciprocal_rounded_once(dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    scale = torch.rand(1000, 1) + 0.5
    q = kernels.quantize(torch.ones(1000, 1, dtype=x_dtype), scale, dtype)
    checks.assert_arrays_equal(checks.array(q.scale_inv), oracle.reciprocal(scale.numpy()), "scale_inv")


def test_subnormal_codes_where_the_processor_flushes_subnormal_numbers() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    quantized = kernels.Quantized(codes, None, None, torch.ones(()), None)
    want = kernels.dequantize(quantized)
    torch.set_flush_denormal(True)
    try:
        got = kernels.dequantize(quantized)
    finally:
        torch.set_flush_denormal(False)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
