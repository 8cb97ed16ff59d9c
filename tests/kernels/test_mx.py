"""`quantize_mx`: blocks of 32 along the rows with E8M0 scales, against the oracle."""

from __future__ import annotations

import copy

import chex
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from scoped_fn import kernels
from tests.helpers import assert_disjoint
from tests.kernels import checks, inputs

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = st.sampled_from(inputs.FP8)


@given(x=inputs.tensors(), dtype=FP8, transpose=st.booleans())
def test_any_tensor(x: torch.Tensor, dtype: torch.dtype, transpose: bool) -> None:
    checks.check_quantize_mx(kernels.quantize_mx, x, dtype, transpose=transpose)


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
@pytest.mark.parametrize("shape", [(), (3,), (0, 5), (5, 0), (1, 1), (33, 65), (2, 17, 96)], ids=str)
@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_shapes_and_layouts(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    x = inputs.lay_out(inputs.values(shape, torch.float16, "normal", 3), layout)
    checks.check_quantize_mx(kernels.quantize_mx, x, dtype, transpose=True)


@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_every_bfloat16_value(dtype: torch.dtype) -> None:
    x = inputs.every_bfloat16()
    shuffled = x.flatten()[torch.randperm(x.numel())].view_as(x)
    for one in (x, shuffled):
        checks.check_quantize_mx(kernels.quantize_mx, one, dtype, transpose=True)


@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_amaxes_around_each_power_of_two(dtype: torch.dtype) -> None:
    """The largest value of the format times each power of two, and its float32 neighbours, a block each."""
    fmt = inputs.FORMATS[dtype]
    with np.errstate(over="ignore", under="ignore"):
        edges = np.ldexp(fmt.max, np.arange(-160, 120)).astype(np.float32)
        powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
        amax = np.concatenate([edges, powers])
        amax = np.concatenate([amax, np.nextafter(amax, np.float32(0)), np.nextafter(amax, np.float32(1e38))])
    x = torch.from_numpy(amax).reshape(-1, 1) * torch.tensor([[1.0, -0.5, 0.3]])
    checks.check_quantize_mx(kernels.quantize_mx, x, dtype)


@given(x=inputs.tensors(min_dims=1), dtype=FP8)
def test_dequantize(x: torch.Tensor, dtype: torch.dtype) -> None:
    q = kernels.quantize_mx(x, dtype, transpose=True)
    checks.check_dequantize(kernels.dequantize, q)
    checks.check_dequantize(kernels.dequantize, q, x.dtype)
    checks.check_dequantize(kernels.dequantize, q.mT)


@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_dequantize_every_scale_byte_and_every_code(dtype: torch.dtype) -> None:
    codes = np.arange(256, dtype=np.uint8)[None, :].repeat(256, axis=0)
    q = checks.operand(codes, np.arange(256, dtype=np.uint8)[:, None].repeat(8, axis=1), dtype)
    for out in inputs.DTYPES:
        checks.check_dequantize(kernels.dequantize, q, out)


def test_scale_bytes_zero_and_255_in_dequantize() -> None:
    q = checks.operand(np.full((1, 64), 0x38, np.uint8), np.uint8([[0, 255]]), torch.float8_e4m3fn)
    value = kernels.dequantize(q)
    assert value[0, 0] == 2.0**-127
    assert value[0, 32:].isnan().all()


def test_a_grid_of_blocks_of_the_public_suite() -> None:
    amax = 448 * torch.tensor([[2.0**-2, 2.0**-1], [1.0, 2.0]])
    x = amax.repeat_interleave(32, 0).repeat_interleave(32, 1)
    q = kernels.quantize_mx(x, torch.float8_e4m3fn, transpose=True)
    assert q.scale_inv[::32].tolist() == [[125, 126], [127, 128]]
    assert q.scale_inv_t[::32].tolist() == [[125, 127], [126, 128]]


@given(x=inputs.tensors(), dtype=FP8)
def test_the_rows_are_the_same_with_and_without_the_transposed_copy(x: torch.Tensor, dtype: torch.dtype) -> None:
    alone, both = (kernels.quantize_mx(x, dtype, transpose=transpose) for transpose in (False, True))
    np.testing.assert_array_equal(checks.array(alone.data), checks.array(both.data))
    np.testing.assert_array_equal(checks.array(alone.scale_inv), checks.array(both.scale_inv))
    assert alone.data_t is None
    assert alone.scale_inv_t is None
    assert alone.amax is None


@given(shape=inputs.shapes(min_dims=1))
def test_shapes_of_scales(shape: tuple[int, ...]) -> None:
    q = kernels.quantize_mx(torch.ones(shape), torch.float8_e4m3fn, transpose=True)
    m, k = torch.Size(shape[:-1]).numel(), shape[-1]
    chex.assert_shape(checks.array(q.scale_inv), (m, -(-k // 32)))
    chex.assert_shape(checks.array(q.scale_inv_t), (k, -(-m // 32)))
    chex.assert_type([checks.array(q.scale_inv), checks.array(q.scale_inv_t)], np.uint8)


@given(x=inputs.tensors(kinds=inputs.FINITE_KINDS), dtype=FP8)
def test_quantizing_what_was_dequantized_changes_nothing(x: torch.Tensor, dtype: torch.dtype) -> None:
    back = kernels.dequantize(kernels.quantize_mx(x, dtype))
    assume(back.isfinite().all())  # next to the largest float32, the nearest value is beyond it
    again = kernels.dequantize(kernels.quantize_mx(back, dtype))
    checks.assert_arrays_equal(checks.array(again), checks.array(back), "dequantized")


@given(seed=inputs.SEEDS, dtype=FP8)
def test_a_byte_is_the_smallest_that_brings_the_block_into_range(seed: int, dtype: torch.dtype) -> None:
    x = inputs.values((200, 32), torch.float32, "finite bits", seed)
    byte = checks.array(kernels.quantize_mx(x, dtype).scale_inv)[:, 0].astype(np.float64)
    amax = x.abs().amax(1).double().numpy()
    limit = float(inputs.FORMATS[dtype].max) * 2.0 ** (byte - 127)
    known = byte >= 2
    assert np.all((amax <= limit)[known])
    # The product with the rounded reciprocal errs by one unit in the last place.
    assert np.all((amax > limit / 2 * (1 - 2.0**-23))[known])


@given(seed=inputs.SEEDS, dtype=FP8)
def test_a_shard_quantizes_as_the_whole(seed: int, dtype: torch.dtype) -> None:
    x = inputs.values((64, 96), torch.bfloat16, "normal", seed)
    whole, shard = kernels.quantize_mx(x, dtype), kernels.quantize_mx(x[:, 32:64], dtype)
    np.testing.assert_array_equal(checks.array(whole.data)[:, 32:64], checks.array(shard.data))
    np.testing.assert_array_equal(whole.scale_inv[:, 1:2], shard.scale_inv)


@given(x=inputs.tensors(), dtype=FP8)
def test_inputs_stay_and_outputs_are_new_memory(x: torch.Tensor, dtype: torch.dtype) -> None:
    before = copy.deepcopy(x)
    q = kernels.quantize_mx(x, dtype, transpose=True)
    kernels.dequantize(q)
    checks.assert_arrays_equal(checks.array(x), checks.array(before), "x")
    assert_disjoint(x, *(one for one in q if one is not None))


def test_a_block_with_an_infinity_or_nan_shows_it() -> None:
    x = torch.ones(3, 32)
    x[0, 5], x[1, 6], x[2, :] = torch.inf, torch.nan, torch.nan
    q = checks.check_quantize_mx(kernels.quantize_mx, x, torch.float8_e5m2)
    assert q.scale_inv[:, 0].tolist() == [254, 112, 0]
    assert kernels.dequantize(q).isnan().sum(1).tolist() == [1, 1, 32]
