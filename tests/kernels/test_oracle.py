"""The oracle itself: against ml_dtypes, which shares no code with it, and against the golden vectors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import golden
from tests.kernels import numpy_oracle as oracle

NAMES = {"e4m3": oracle.E4M3, "e5m2": oracle.E5M2}
ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
FORMATS = {**NAMES, "e2m1": oracle.E2M1}


def _theirs(x: np.ndarray, name: str) -> np.ndarray:
    """Codes of ml_dtypes, of values within the range of the format, where it has no saturation to do."""
    return x.astype(ML_DTYPES[name]).view(np.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_every_bfloat16_value_has_the_code_that_ml_dtypes_gives(name: str) -> None:
    fmt = NAMES[name]
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    ours = oracle.encode(x, fmt)
    inside = np.abs(x) <= fmt.max
    np.testing.assert_array_equal(ours[inside], _theirs(x[inside], name))
    beyond = np.abs(x) > fmt.max
    np.testing.assert_array_equal(oracle.decode(ours[beyond], fmt), np.copysign(fmt.max, x[beyond]))
    assert np.isnan(oracle.decode(ours[np.isnan(x)], fmt)).all()


@pytest.mark.parametrize("name", FORMATS)
@given(seed=st.integers(0, 2**32 - 1))
def test_float32_values_round_as_in_ml_dtypes(name: str, seed: int) -> None:
    fmt, rng = FORMATS[name], np.random.default_rng(seed)
    x = np.ldexp(rng.standard_normal(1000), rng.integers(-24, 18, 1000)).clip(-fmt.max, fmt.max).astype(np.float32)
    midpoints = ((fmt.magnitudes()[1:] + fmt.magnitudes()[:-1]) / 2).astype(np.float32)
    x = np.concatenate([x, midpoints, np.nextafter(midpoints, np.float32(0)), -midpoints])
    np.testing.assert_array_equal(oracle.encode(x, fmt), _theirs(x, name))


@pytest.mark.parametrize("name", NAMES)
def test_all_codes_have_the_value_that_ml_dtypes_gives(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ML_DTYPES[name]).astype(np.float32)
    values = oracle.decode(codes, NAMES[name])
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.signbit(values)[~np.isnan(values)], np.signbit(expected)[~np.isnan(expected)])


@pytest.mark.parametrize("name", NAMES)
def test_encode_undoes_decode(name: str) -> None:
    fmt = NAMES[name]
    codes = np.arange(256, dtype=np.uint8)
    finite = np.isfinite(oracle.decode(codes, fmt))
    np.testing.assert_array_equal(oracle.encode(oracle.decode(codes, fmt), fmt)[finite], codes[finite])


def test_scale_bytes_stand_for_the_powers_that_ml_dtypes_gives() -> None:
    byte = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(oracle.power_of(byte), byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


def test_four_bit_values_are_those_of_the_format() -> None:
    assert oracle.E2M1.magnitudes().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize(("value", "expected"), golden.E2M1_TIES)
def test_golden_ties_of_four_bits(value: float, expected: float) -> None:
    assert oracle.decode(oracle.encode(np.float32([value, -value]), oracle.E2M1), oracle.E2M1).tolist() == [
        expected,
        -expected,
    ]


@pytest.mark.parametrize("case", golden.CURRENT, ids=str)
def test_golden_scales_of_current_scaling(case: golden.Current) -> None:
    fmt, options = NAMES[case.format], {"power_of_2": case.power_of_2, "epsilon": case.epsilon}
    assert oracle.scale_of(np.float32(case.amax), fmt, **options) == np.float32(case.scale)


@pytest.mark.parametrize(("name", "amax", "byte"), golden.E8M0)
def test_golden_bytes_of_mx_scales(name: str, amax: float, byte: int) -> None:
    assert oracle.e8m0(np.float32(amax), NAMES[name]) == byte


@pytest.mark.parametrize("exponent", range(-120, 120))
def test_golden_bytes_of_powers_of_two(exponent: int) -> None:
    assert oracle.e8m0(np.float32(448 * 2.0**exponent), oracle.E4M3) == 127 + exponent


@pytest.mark.parametrize("case", golden.UPDATES, ids=str)
def test_golden_scales_of_the_update(case: golden.Update) -> None:
    history, scale = np.float32(case.history)[:, None], np.float32([case.scale])
    fp8_max, scales = np.float32([NAMES[case.format].max]), []
    for amax in case.amaxes:
        history[0] = amax
        history, scale = oracle.update_scales(
            history, scale, fp8_max, most_recent=case.algorithm == "most_recent", margin=case.margin
        )
        scales.append(scale.item())
    np.testing.assert_array_equal(np.float32(scales), np.float32(case.scales))
    if case.final is not None:
        assert history[:, 0].tolist() == case.final


@given(seed=st.integers(0, 2**32 - 1))
def test_a_scale_byte_brings_the_amax_into_range_and_is_the_smallest(seed: int) -> None:
    amax = np.random.default_rng(seed).integers(1, 0x7F800000, 2000).astype(np.uint32).view(np.float32)
    for fmt in NAMES.values():
        byte = oracle.e8m0(amax, fmt).astype(np.float64)
        known = byte >= 2
        limit = np.float64(fmt.max) * 2.0 ** (byte - 127)
        assert np.all((amax <= limit)[known])
        assert np.all((amax > limit / 2 * (1 - 2.0**-23))[known])
