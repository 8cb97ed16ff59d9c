"""`quantize_blocks`, 1x128 and 128x128, against the oracle."""

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

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = st.sampled_from(inputs.FP8)
OPTIONS = st.fixed_dictionaries(
    {
        "block_rows": st.sampled_from([1, 128]),
        "power_of_2": st.booleans(),
        "epsilon": st.sampled_from([0.0, 1e-6, 10.0]),
        "transpose": st.booleans(),
    }
)


@given(x=inputs.tensors(), dtype=FP8, options=OPTIONS)
def test_any_tensor(x: torch.Tensor, dtype: torch.dtype, options: dict[str, object]) -> None:
    checks.check_quantize_blocks(kernels.quantize_blocks, x, dtype, **options)


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("shape", [(), (3,), (0, 5), (5, 0), (1, 1), (129, 257), (2, 65, 130)], ids=str)
def test_shapes_and_layouts(shape: tuple[int, ...], block_rows: int, layout: str) -> None:
    x = inputs.lay_out(inputs.values(shape, torch.bfloat16, "rows apart", 3), layout)
    checks.check_quantize_blocks(kernels.quantize_blocks, x, torch.float8_e4m3fn, block_rows=block_rows, transpose=True)


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(128, 128), (256, 256), (303, 300), (305, 256)], ids=str)
def test_sizes_of_the_public_suite(
    shape: tuple[int, int], x_dtype: torch.dtype, dtype: torch.dtype, block_rows: int, power_of_2: bool
) -> None:
    x = inputs.values(shape, x_dtype, "normal", 5)
    options = {"block_rows": block_rows, "power_of_2": power_of_2, "transpose": True}
    checks.check_quantize_blocks(kernels.quantize_blocks, x, dtype, **options)


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_every_bfloat16_value(dtype: torch.dtype, block_rows: int) -> None:
    # Sorted, so that a block holds values of like magnitude, and shuffled, so that it does not.
    x = inputs.every_bfloat16()
    shuffled = x.flatten()[torch.randperm(x.numel())].view_as(x)
    for one in (x, shuffled):
        checks.check_quantize_blocks(kernels.quantize_blocks, one, dtype, block_rows=block_rows, transpose=True)
        checks.check_quantize_blocks(kernels.quantize_blocks, one, dtype, block_rows=block_rows, power_of_2=False)


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("x_dtype", inputs.DTYPES, ids=str)
def test_extreme_blocks(x_dtype: torch.dtype, block_rows: int, power_of_2: bool) -> None:
    """Blocks of zeros, of the largest and the smallest value, with an infinity and with NaN only, side by side."""
    x = torch.randn(128, 6 * 128).to(x_dtype)
    x[:, :128] = 0
    x[:, 128:256] = torch.finfo(x_dtype).max
    x[:, 256:384] = torch.finfo(x_dtype).smallest_normal * torch.finfo(x_dtype).eps
    x[:, 384] = torch.inf
    x[:, 512:640] = torch.nan
    q = checks.check_quantize_blocks(
        kernels.quantize_blocks, x, torch.float8_e4m3fn, block_rows=block_rows, power_of_2=power_of_2, transpose=True
    )
    assert q.scale_inv[:, [0, 3, 4]].eq(1).all()


@pytest.mark.parametrize(("x_dtype", "expected"), [(torch.bfloat16, 2.0**127), (torch.float32, 2.0**127)], ids=str)
def test_a_scale_beyond_float32_is_the_largest_of_the_dtype_of_x(x_dtype: torch.dtype, expected: float) -> None:
    x = torch.full((1, 128), 2.0**-133).to(x_dtype)
    power = kernels.quantize_blocks(x, torch.float8_e4m3fn)
    assert float(power.scale_inv) == 1 / expected
    exact = kernels.quantize_blocks(x, torch.float8_e4m3fn, power_of_2=False)
    assert float(exact.scale_inv) == np.float32(1) / checks.largest_of(x)


@given(shape=inputs.shapes(min_dims=1), block_rows=st.sampled_from([1, 128]))
def test_shapes_of_scales(shape: tuple[int, ...], block_rows: int) -> None:
    q = kernels.quantize_blocks(torch.ones(shape), torch.float8_e4m3fn, block_rows=block_rows, transpose=True)
    m, k = torch.Size(shape[:-1]).numel(), shape[-1]
    blocks = (-(-m // 128), -(-k // 128))
    chex.assert_shape(checks.array(q.scale_inv), (m if block_rows == 1 else blocks[0], blocks[1]))
    chex.assert_shape(checks.array(q.scale_inv_t), (k if block_rows == 1 else blocks[1], blocks[0]))
    chex.assert_type([checks.array(q.scale_inv), checks.array(q.scale_inv_t)], np.float32)
    assert q.amax is None


def test_power_of_two_scales_are_the_default_and_no_copy_is_made_unasked() -> None:
    q = kernels.quantize_blocks(torch.full((1, 128), 3.0), torch.float8_e4m3fn)
    assert float(q.scale_inv) == 1 / 128
    assert q.data_t is None
    assert q.scale_inv_t is None


@given(x=inputs.tensors(min_dims=2), dtype=FP8, block_rows=st.sampled_from([1, 128]), power_of_2=st.booleans())
def test_dequantize(x: torch.Tensor, dtype: torch.dtype, block_rows: int, power_of_2: bool) -> None:
    q = kernels.quantize_blocks(x, dtype, block_rows=block_rows, power_of_2=power_of_2, transpose=True)
    checks.check_dequantize(kernels.dequantize, q)
    checks.check_dequantize(kernels.dequantize, q, x.dtype)
    checks.check_dequantize(kernels.dequantize, q.mT)


@given(x=inputs.tensors(kinds=("normal", "zeros", "rows apart")), dtype=FP8, block_rows=st.sampled_from([1, 128]))
def test_quantizing_what_was_dequantized_changes_nothing(x: torch.Tensor, dtype: torch.dtype, block_rows: int) -> None:
    # Powers of two: the round trip through float32 is exact, so values, if not scales and codes, stay.
    back = kernels.dequantize(kernels.quantize_blocks(x, dtype, block_rows=block_rows))
    again = kernels.dequantize(kernels.quantize_blocks(back, dtype, block_rows=block_rows))
    checks.assert_arrays_equal(checks.array(again), checks.array(back), "dequantized")


@given(seed=inputs.SEEDS, dtype=FP8)
def test_a_block_does_not_see_its_neighbours(seed: int, dtype: torch.dtype) -> None:
    x = inputs.values((130, 384), torch.float32, "normal", seed)
    whole = kernels.quantize_blocks(x, dtype, transpose=True)
    part = kernels.quantize_blocks(x[:, 128:256], dtype)
    np.testing.assert_array_equal(checks.array(whole.data)[:, 128:256], checks.array(part.data))
    np.testing.assert_array_equal(whole.scale_inv[:, 1:2], part.scale_inv)
    shard = kernels.quantize_blocks(x[:128], dtype, transpose=True)
    np.testing.assert_array_equal(checks.array(whole.data_t)[:, :128], checks.array(shard.data_t))
    np.testing.assert_array_equal(whole.scale_inv_t[:, :1], shard.scale_inv_t)


@given(x=inputs.tensors(), dtype=FP8, block_rows=st.sampled_from([1, 128]))
def test_inputs_stay_and_outputs_are_new_memory(x: torch.Tensor, dtype: torch.dtype, block_rows: int) -> None:
    before = copy.deepcopy(x)
    q = kernels.quantize_blocks(x, dtype, block_rows=block_rows, transpose=True)
    kernels.dequantize(q)
    checks.assert_arrays_equal(checks.array(x), checks.array(before), "x")
    assert_disjoint(x, q.data, q.data_t, q.scale_inv)
    assert_disjoint(x, q.data, q.data_t, q.scale_inv_t)


@given(seed=inputs.SEEDS, dtype=FP8)
def test_power_of_two_scales_are_the_largest_below_exact_ones(seed: int, dtype: torch.dtype) -> None:
    x = inputs.values((64, 128), torch.float32, "rows apart", seed)
    exact, power = (
        1 / checks.array(kernels.quantize_blocks(x, dtype, power_of_2=p).scale_inv).astype(np.float64)
        for p in (False, True)
    )
    assert np.all(power <= exact * (1 + 2.0**-22))
    assert np.all(exact < 2 * power * (1 + 2.0**-22))
    assert np.all(np.frexp(power)[0] == 0.5)
