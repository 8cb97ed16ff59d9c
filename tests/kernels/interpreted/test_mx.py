"""MXFP8: powers of two of blocks of 32."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn.kernels import _reference as reference
from scoped_fn.kernels._tiles import Tile
from scoped_fn.kernels.gpu import mx as gpu
from tests.kernels.interpreted.guarded import assert_all_same, guarded
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


@given(batches, sizes, sizes, float_dtypes, fp8_dtypes, arrangements, st.booleans(), seeds)
def test_quantize_mx(batch, rows, columns, dtype, fp8, how, transpose, seed):
    x = arranged(numbers((batch, rows, columns), dtype, seed), how)
    assert_all_same(guarded(gpu.quantize_mx, x, fp8, transpose), reference.quantize_mx(x, fp8, transpose))


GOLDEN = [(0.0, 0), (1e-40, 0), (1.0, 119), (3.0, 120), (448.0, 127), (449.0, 128), (896.0, 128), (3e38, 247)]
GOLDEN_E5M2 = [(1.0, 112), (3.0, 113), (448.0, 120), (449.0, 121), (torch.inf, 254)]


@pytest.mark.parametrize(
    ("dtype", "amax", "byte"), [(E4M3, *g) for g in [*GOLDEN, (torch.inf, 254)]] + [(E5M2, *g) for g in GOLDEN_E5M2]
)
def test_golden_exponents(dtype: torch.dtype, amax: float, byte: int) -> None:
    _, scale, _, scale_t = gpu.quantize_mx(torch.tensor([[[amax]]]), dtype, True)
    assert (scale.item(), scale_t.item()) == (byte, byte)


def test_448_times_a_power_of_2_is_exact() -> None:
    k = torch.arange(-120, 120)
    x = (448.0 * torch.exp2(k.double())).float()[None, :, None]
    _, scale, _, _ = guarded(gpu.quantize_mx, x, E4M3, False)
    assert torch.equal(scale.flatten().int(), (127 + k).int())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_exponent_and_its_neighbors(dtype: torch.dtype) -> None:
    powers = torch.arange(0, 255, dtype=torch.int32) << 23
    bits = torch.cat([powers - 1, powers, powers + 1, powers + 0x400000, powers + 0x600000, powers + 0x600001])
    x = torch.zeros(1, bits.numel(), 32)
    x[0, :, 7] = bits.clamp(min=0).view(torch.float32)
    x[0, :, 8] = -x[0, :, 7] / 3
    tile = Tile(block_m=512, block_k=32)
    got = guarded(gpu.quantize_mx, x, dtype, False, tile=tile)
    assert_all_same(got, reference.quantize_mx(x, dtype, False))


def test_only_nan() -> None:
    got = guarded(gpu.quantize_mx, torch.full((1, 32, 32), torch.nan), E4M3, True, tile=Tile(block_m=32, block_k=32))
    assert_all_same(got, reference.quantize_mx(torch.full((1, 32, 32), torch.nan), E4M3, True))
    assert got[1].eq(0).all()
