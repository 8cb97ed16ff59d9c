"""Back from FP8, for every layout of scales."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn.kernels import _reference as reference
from scoped_fn.kernels.gpu.dequantize import dequantize
from tests.kernels.interpreted.guarded import assert_same, guarded
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


def block_counts(size: int, block: int) -> int:
    return -(-size // block) if block else 1


@given(
    batches,
    sizes,
    sizes,
    fp8_dtypes,
    float_dtypes,
    arrangements,
    st.sampled_from((0, 1, 128)),
    st.sampled_from((0, 128)),
    st.booleans(),
    seeds,
)
def test_float_scales(batch, rows, columns, fp8, dtype, how, block_rows, block_columns, turned, seed):
    data = arranged(numbers((batch, rows, columns), torch.float32, seed).to(fp8), how)
    shape = (batch, block_counts(rows, block_rows), block_counts(columns, block_columns))
    scale_inv = numbers(shape, torch.float32, seed, special=False).abs()
    scale_inv = scale_inv.mT.contiguous().mT if turned else scale_inv
    wanted = reference.dequantize(data, scale_inv, dtype)
    assert_same(guarded(dequantize, data, scale_inv, dtype), wanted)


@given(batches, sizes, sizes, fp8_dtypes, float_dtypes, arrangements, seeds)
def test_exponents(batch, rows, columns, fp8, dtype, how, seed):
    data = arranged(numbers((batch, rows, columns), torch.float32, seed).to(fp8), how)
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(256, (batch, rows, -(-columns // 32)), generator=generator).to(torch.uint8)
    wanted = reference.dequantize(data, scale, dtype)
    assert_same(guarded(dequantize, data, scale, dtype), wanted)


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_every_code_with_every_exponent(fp8: torch.dtype) -> None:
    data = torch.arange(256, dtype=torch.uint8).view(fp8).expand(1, 256, 256)
    scale = torch.arange(256, dtype=torch.uint8)[None, :, None].expand(1, 256, 8)
    wanted = reference.dequantize(data, scale, torch.float32)
    assert_same(guarded(dequantize, data, scale, torch.float32), wanted)
