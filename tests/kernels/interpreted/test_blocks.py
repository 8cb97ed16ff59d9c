"""Scales of blocks of 128 along a row, and of 128 by 128."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn.kernels import _reference as reference
from scoped_fn.kernels._tiles import Tile
from scoped_fn.kernels.gpu import blocks as gpu
from tests.kernels import interpreter
from tests.kernels.interpreted import expected
from tests.kernels.interpreted.guarded import assert_all_same, assert_same, guarded
from tests.kernels.interpreted.inputs import (
    E4M3,
    E5M2,
    arranged,
    arrangements,
    batches,
    float_dtypes,
    fp8_dtypes,
    numbers,
    seeds,
    sizes,
)

SQUARE = Tile(block_m=128, block_k=128)


@given(
    batches,
    sizes,
    sizes,
    float_dtypes,
    fp8_dtypes,
    arrangements,
    st.sampled_from((1, 128)),
    st.booleans(),
    st.sampled_from((0.0, 1e-12, 3.0)),
    st.booleans(),
    seeds,
)
def test_quantize_blocks(batch, rows, columns, dtype, fp8, how, block_rows, power_of_2, epsilon, transpose, seed):
    x = arranged(numbers((batch, rows, columns), dtype, seed), how)
    arguments = (x, fp8, block_rows, power_of_2, epsilon, transpose)
    wanted = reference.quantize_blocks(*arguments)
    assert_all_same(guarded(gpu.quantize_blocks, *arguments), wanted)
    # With a tile, both are written from one read, also where the sizes are odd.
    assert_all_same(guarded(gpu.quantize_blocks, *arguments, tile=SQUARE), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("power_of_2", [False, True])
def test_a_scale_that_overflows_is_the_largest_of_the_input(
    dtype: torch.dtype, block_rows: int, power_of_2: bool
) -> None:
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.full((1, 2, 3), smallest, dtype=dtype)
    assert x.all()
    data, scale_inv, *_ = guarded(gpu.quantize_blocks, x, E4M3, block_rows, power_of_2, 0.0, False)
    assert_all_same((data, scale_inv), reference.quantize_blocks(x, E4M3, block_rows, power_of_2, 0.0, False)[:2])
    if dtype == torch.bfloat16 and not power_of_2:
        limit = torch.tensor(3.3895313892515355e38)
        assert_same(scale_inv, expected.one_over(limit).expand_as(scale_inv).contiguous())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block_rows", [1, 128])
def test_where_casts_are_poor_the_kernel_rounds(
    dtype: torch.dtype, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "arch_of", lambda x: "hip:gfx950")
    # The scale of an amax that is not finite is 1, which saturates what is finite and large.
    x = numbers((1, 129, 257), torch.float32, 0)
    with interpreter.poor_casts():
        got = guarded(gpu.quantize_blocks, x, dtype, block_rows, False, 0.0, True)
    assert_all_same(got, reference.quantize_blocks(x, dtype, block_rows, False, 0.0, True))
