"""`scaled_mm` of every pair of scale layouts, against the product in float64 within the bound of float32 sums."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn import kernels
from tests.helpers import assert_disjoint
from tests.kernels import checks, inputs

pytestmark = pytest.mark.usefixtures("one_thread")

PER = ("tensor", "row", "1x128", "128x128", "mx")
SIZES = (0, 1, 2, 3, 16, 31, 127, 128, 129, 300)
# Scales spread over many powers of two, so that a scale at the wrong place shows.
SPREADS = ("ones", "powers", "any", "tiny", "huge")


def _scales(shape: tuple[int, ...], spread: str, rng: np.random.Generator) -> np.ndarray:
    table = {
        "ones": lambda: np.ones(shape),
        "powers": lambda: 2.0 ** rng.integers(-12, 13, shape),
        "any": lambda: np.exp(3 * rng.standard_normal(shape)),
        "tiny": lambda: 2.0**-50 * (1 + rng.random(shape)),
        "huge": lambda: 2.0**40 * (1 + rng.random(shape)),
    }
    if spread.startswith("2**"):
        return np.full(shape, 2.0 ** int(spread.removeprefix("2**")), np.float32)
    return np.asarray(table[spread](), np.float32)


def _operand(rows: int, k: int, per: str, dtype: torch.dtype, seed: int, spread: str = "any") -> kernels.Quantized:
    """Codes drawn from all finite ones, small ones as often as large ones."""
    rng = np.random.default_rng(seed)
    fmt = inputs.FORMATS[dtype]
    codes = rng.integers(0, fmt.max_code + 1, (rows, k), dtype=np.uint8) | rng.choice(np.uint8([0, 128]), (rows, k))
    if per == "mx":
        return checks.operand(codes, rng.integers(110, 140, (rows, -(-k // 32)), dtype=np.uint8), dtype)
    blocks = -(-k // 128)
    shape = {"tensor": (), "row": (rows, 1), "1x128": (rows, blocks), "128x128": (-(-rows // 128), blocks)}[per]
    return checks.operand(codes, _scales(shape, spread, rng), dtype)


@st.composite
def products(draw: st.DrawFn) -> tuple[kernels.Quantized, kernels.Quantized]:
    m, n, k = (draw(st.sampled_from(SIZES)) for _ in range(3))
    return tuple(
        _operand(
            rows,
            k,
            draw(st.sampled_from(PER)),
            draw(st.sampled_from(inputs.FP8)),
            draw(inputs.SEEDS),
            draw(st.sampled_from(SPREADS)),
        )
        for rows in (m, n)
    )


@given(
    operands=products(),
    out_dtype=st.sampled_from(inputs.DTYPES),
    bias_dtype=st.sampled_from([None, *inputs.DTYPES]),
    fast_accum=st.booleans(),
)
def test_any_product(
    operands: tuple[kernels.Quantized, kernels.Quantized],
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    fast_accum: bool,
) -> None:
    a, weight = operands
    bias = None if bias_dtype is None else torch.randn(weight.data.shape[0]).to(bias_dtype)
    checks.check_scaled_mm(kernels.scaled_mm, a, weight, bias=bias, out_dtype=out_dtype, fast_accum=fast_accum)


@pytest.mark.parametrize("per_b", PER)
@pytest.mark.parametrize("per_a", PER)
@pytest.mark.parametrize("out_dtype", inputs.DTYPES, ids=str)
def test_every_pair_of_layouts(per_a: str, per_b: str, out_dtype: torch.dtype) -> None:
    for seed, spread in enumerate(("powers", "any")):
        a = _operand(130, 260, per_a, torch.float8_e4m3fn, seed, spread)
        weight = _operand(150, 260, per_b, torch.float8_e5m2, seed + 10, spread)
        bias = torch.randn(150).to(out_dtype)
        checks.check_scaled_mm(kernels.scaled_mm, a, weight, bias=bias, out_dtype=out_dtype)
        checks.check_scaled_mm(kernels.scaled_mm, a, weight, out_dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(130, 200, 50), (1, 300, 128), (300, 1, 1), (257, 129, 127)])
def test_blocks_of_many_rows_and_a_single_column(m: int, n: int, k: int, out_dtype: torch.dtype) -> None:
    for per_a, per_b in (("128x128", "128x128"), ("128x128", "row"), ("tensor", "128x128"), ("1x128", "128x128")):
        a, weight = _operand(m, k, per_a, torch.float8_e4m3fn, 1), _operand(n, k, per_b, torch.float8_e5m2, 2)
        checks.check_scaled_mm(kernels.scaled_mm, a, weight, out_dtype=out_dtype)


@pytest.mark.parametrize("per", ["tensor", "row", "1x128", "128x128"])
@pytest.mark.parametrize("out_dtype", inputs.DTYPES, ids=str)
def test_powers_of_two_near_the_ends_of_float32(per: str, out_dtype: torch.dtype) -> None:
    """Subnormal codes times such a scale lose bits in bfloat16, though not in float32."""
    for seed, exponents in enumerate(((-126, 60), (60, -126), (116, -126), (-60, -60))):
        a, weight = (
            _operand(rows, 140, per, torch.float8_e4m3fn, seed + rows, f"2**{exponent}")
            for rows, exponent in zip((130, 20), exponents, strict=True)
        )
        a, weight = (q._replace(data=(q.data.view(torch.uint8) & 0x87).view(q.data.dtype)) for q in (a, weight))
        checks.check_scaled_mm(kernels.scaled_mm, a, weight, out_dtype=out_dtype)


@pytest.mark.parametrize("dtype_b", inputs.FP8, ids=str)
@pytest.mark.parametrize("dtype_a", inputs.FP8, ids=str)
def test_every_pair_of_formats(dtype_a: torch.dtype, dtype_b: torch.dtype) -> None:
    a, weight = _operand(9, 70, "row", dtype_a, 1), _operand(5, 70, "row", dtype_b, 2)
    checks.check_scaled_mm(kernels.scaled_mm, a, weight, out_dtype=torch.float32)


@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_the_product_with_the_identity_gives_every_code_exactly(dtype: torch.dtype) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(codes).view(dtype).float()
    one = torch.eye(16).to(dtype).view(torch.uint8).numpy()
    finite = torch.where(values.isfinite(), values, 0.0).reshape(16, 16)
    a = checks.operand(finite.to(dtype).view(torch.uint8).numpy(), np.float32(1), dtype)
    weight = checks.operand(one, np.float32(0.5), dtype)
    y = kernels.scaled_mm(a, weight.mT, out_dtype=torch.float32)
    torch.testing.assert_close(y, finite / 2, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0,), (1, 0, 3), (2, 3), (2, 3, 5)], ids=str)
def test_leading_dimensions_stay(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, 40)
    a = kernels.quantize(x, torch.tensor(3.0), torch.float8_e4m3fn)
    checks.check_scaled_mm(kernels.scaled_mm, a, _operand(7, 40, "row", torch.float8_e5m2, 3))


@pytest.mark.parametrize("bias_dtype", [None, *inputs.DTYPES], ids=str)
@pytest.mark.parametrize("out_dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("per", PER)
def test_an_inner_dimension_of_nothing_gives_the_bias(
    per: str, out_dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> None:
    a, weight = (_operand(rows, 0, per, torch.float8_e4m3fn, 1) for rows in (3, 4))
    bias = None if bias_dtype is None else torch.randn(4).to(bias_dtype)
    y = kernels.scaled_mm(a, weight.mT, bias=bias, out_dtype=out_dtype)
    expected = torch.zeros(4, dtype=out_dtype) if bias is None else bias.to(out_dtype)
    assert y.shape == (3, 4)
    assert y.dtype == out_dtype
    assert y.eq(expected).all()


@pytest.mark.parametrize("out_dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_nan_shows_in_its_row_and_column_only(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    x, w = torch.ones(4, 40), torch.ones(5, 40)
    x[1, 3], w[2, 7] = torch.nan, torch.inf
    a, weight = (kernels.quantize(one, torch.tensor(1.0), dtype) for one in (x, w))
    y = checks.check_scaled_mm(kernels.scaled_mm, a, weight, out_dtype=out_dtype)
    assert y[[0, 2, 3]][:, [0, 1, 3, 4]].eq(40).all()
    assert y[1].isnan().all()
    assert y[:, 2].isnan().all()


def test_a_float16_result_beyond_the_range_is_infinite() -> None:
    a = kernels.quantize(torch.full((1, 2), 300.0), torch.tensor(1.0), torch.float8_e4m3fn)
    y = kernels.scaled_mm(a, a.mT, out_dtype=torch.float16)
    assert y.item() == float("inf")


@pytest.mark.parametrize("x_dtype", inputs.DTYPES, ids=str)
@pytest.mark.parametrize("scaling", ["current", "row", "1x128", "128x128", "mx"])
def test_the_three_products_of_a_linear_function(scaling: str, x_dtype: torch.dtype) -> None:
    """Forward, gradient of the input, gradient of the weight: rows against the copies that quantizing made."""

    def cast(one: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> kernels.Quantized:
        if scaling == "current":
            return kernels.quantize_current(one, dtype, transpose=True)
        if scaling == "row":
            return kernels.quantize(one, torch.full((one.shape[0], 1), 7.0), dtype, transpose=True)
        if scaling == "mx":
            return kernels.quantize_mx(one, dtype, transpose=True)
        return kernels.quantize_blocks(one, dtype, block_rows=int(scaling.split("x")[0]), transpose=True)

    def rows(q: kernels.Quantized) -> kernels.Quantized:
        """Along the rows alone, for the oracle."""
        return kernels.Quantized(q.data, None, None, q.scale_inv, None)

    x, w, dy = cast(torch.randn(37, 200).to(x_dtype)), cast(torch.randn(50, 200).to(x_dtype)), torch.randn(37, 50)
    dy = cast(dy.to(x_dtype), torch.float8_e5m2)
    checks.check_scaled_mm(kernels.scaled_mm, x, w)
    if scaling == "row":
        return  # A scale of each row of dy cannot be taken out of a sum over those rows.
    for left, right in ((dy, w), (dy.mT, x)):
        ours = kernels.scaled_mm(left, right, out_dtype=torch.float32)
        theirs = checks.check_scaled_mm(kernels.scaled_mm, rows(left), rows(right.mT), out_dtype=torch.float32)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@given(operands=products())
def test_inputs_stay_and_the_result_is_new_memory(operands: tuple[kernels.Quantized, kernels.Quantized]) -> None:
    a, weight = operands
    bias = torch.randn(weight.data.shape[0])
    before = copy.deepcopy((a.data, a.scale_inv, weight.data, weight.scale_inv, bias))
    first = kernels.scaled_mm(a, weight.mT, bias=bias)
    second = kernels.scaled_mm(a, weight.mT, bias=bias)
    after = (a.data, a.scale_inv, weight.data, weight.scale_inv, bias)
    for one, other in zip(after, before, strict=True):
        checks.assert_arrays_equal(checks.array(one), checks.array(other), "input")
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    assert_disjoint(after, first, second)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "offset"])
def test_strides_of_operands_change_nothing(layout: str) -> None:
    a, weight = (_operand(rows, 140, "row", torch.float8_e4m3fn, rows) for rows in (30, 20))

    def strided(t: torch.Tensor) -> torch.Tensor:
        if t.dtype == torch.float32:
            return inputs.lay_out(t, layout)
        wide = inputs.lay_out(t.float(), layout)
        out = torch.empty_strided(wide.shape, wide.stride(), dtype=torch.uint8)
        return (
            out.copy_(wide.to(t.dtype).view(torch.uint8)).view(t.dtype)
            if 0 not in wide.stride()
            else wide[:1].to(t.dtype).expand(wide.shape)
        )

    a = kernels.Quantized(strided(a.data), None, None, strided(a.scale_inv), None)
    weight = kernels.Quantized(strided(weight.data), None, None, strided(weight.scale_inv), None)
    bias = inputs.lay_out(torch.randn(20), layout)
    checks.check_scaled_mm(kernels.scaled_mm, a, weight, bias=bias)
    checks.check_scaled_mm(kernels.scaled_mm, a, weight, bias=bias, out_dtype=torch.float32)


def test_the_result_is_bfloat16_unless_told_otherwise() -> None:
    a = _operand(2, 3, "tensor", torch.float8_e4m3fn, 1)
    assert kernels.scaled_mm(a, a.mT).dtype == torch.bfloat16


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("k", [1, 128, 4096])
def test_long_sums_keep_float32_precision(k: int, spread: str) -> None:
    a, weight = (_operand(8, k, "tensor", torch.float8_e4m3fn, seed, spread) for seed in (1, 2))
    for out_dtype in (torch.float32, torch.bfloat16):
        checks.check_scaled_mm(kernels.scaled_mm, a, weight, out_dtype=out_dtype)
