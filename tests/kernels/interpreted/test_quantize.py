"""Scales of tensors and of rows, given or computed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn.kernels import _reference as reference
from scoped_fn.kernels._tiles import Tile
from scoped_fn.kernels.gpu import quantize as gpu
from tests.kernels import interpreter
from tests.kernels.interpreted import expected
from tests.kernels.interpreted.guarded import assert_all_same, assert_same, guarded
from tests.kernels.interpreted.inputs import (
    E4M3,
    E5M2,
    SPECIAL,
    arranged,
    arrangements,
    batches,
    float_dtypes,
    fp8_dtypes,
    numbers,
    scales,
    seeds,
    sizes,
)

epsilons = st.sampled_from((0.0, 1e-45, 1e-12, 1e-6, 3.0))


@given(batches, sizes, sizes, float_dtypes, fp8_dtypes, arrangements, scales, st.booleans(), st.booleans(), seeds)
def test_quantize(batch, rows, columns, dtype, fp8, how, scale, by_row, transpose, seed):
    x = arranged(numbers((batch, rows, columns), dtype, seed), how)
    scale = scale * numbers((batch, rows if by_row else 1), torch.float32, seed, special=False).abs()
    wanted = reference.quantize(x, scale, fp8, transpose)
    assert_all_same(guarded(gpu.quantize, x, scale, fp8, transpose), wanted)


@given(batches, sizes, sizes, float_dtypes, fp8_dtypes, arrangements, epsilons, st.booleans(), st.booleans(), seeds)
def test_quantize_current(batch, rows, columns, dtype, fp8, how, epsilon, power_of_2, transpose, seed):
    # Special numbers in the smaller ones only: an inf makes every scale 1.
    x = arranged(numbers((batch, rows, columns), dtype, seed, special=rows < 33), how)
    wanted = reference.quantize_current(x, fp8, power_of_2, epsilon, transpose)
    assert_all_same(guarded(gpu.quantize_current, x, fp8, power_of_2, epsilon, transpose), wanted)


@given(batches, sizes, sizes, float_dtypes, arrangements, seeds)
def test_amax(batch, rows, columns, dtype, how, seed):
    x = arranged(numbers((batch, rows, columns), dtype, seed), how)
    assert_same(guarded(gpu.amax, x), reference.quantize(x, torch.ones(batch, 1), E4M3, False)[2])


GOLDEN_SCALES = [(1.0, 448.0), (3.0, 149.33333), (0.0, 1.0), (torch.inf, 1.0), (torch.nan, 1.0), (1e-45, 3.4028235e38)]
GOLDEN_POWERS = [(1.0, 256.0), (3.0, 128.0), (448.0, 1.0), (449.0, 0.5), (1e-45, 2.0**127)]


@pytest.mark.parametrize(
    ("amax", "scale", "power_of_2"), [(*g, False) for g in GOLDEN_SCALES] + [(*g, True) for g in GOLDEN_POWERS]
)
def test_golden_scales(amax: float, scale: float, power_of_2: bool) -> None:
    *_, scale_inv = gpu.quantize_current(torch.full((1, 1, 1), amax), E4M3, power_of_2, 0.0, False)
    assert_same(scale_inv, expected.one_over(torch.tensor([scale])))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 0, 3), (2, 3, 0)])
def test_an_amax_below_epsilon(shape: tuple[int, int, int]) -> None:
    *_, scale_inv = gpu.quantize_current(torch.zeros(shape), E4M3, False, 1e-6, False)
    assert_same(scale_inv, expected.one_over(torch.full(shape[:1], 4.48e8)))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_bfloat16(dtype: torch.dtype) -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(1, 128, 512)
    scale = torch.tensor([[3.0]])
    tile = Tile(block_m=128, block_k=512)
    wanted = reference.quantize(x, scale, dtype, True)
    assert_all_same(guarded(gpu.quantize, x, scale, dtype, True, tile=tile), wanted)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_where_casts_are_poor_the_kernel_rounds(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "arch_of", lambda x: "hip:gfx950")
    x, scale = numbers((2, 70, 300), torch.float32, 0), torch.tensor([[100.0], [1e30]])
    with interpreter.poor_casts():
        assert_all_same(guarded(gpu.quantize, x, scale, dtype, True), reference.quantize(x, scale, dtype, True))
        wanted = reference.quantize_current(x, dtype, False, 0.0, True)
        assert_all_same(guarded(gpu.quantize_current, x, dtype, False, 0.0, True), wanted)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_first_is_rounding_right(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "arch_of", lambda x: "cuda:89")
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    ordered = codes[codes.isfinite()].sort().values
    middles = (ordered[1:] + ordered[:-1]).float() / 2
    beside = [middles.nextafter(torch.tensor(sign * torch.inf)) for sign in (1, -1)]
    x = torch.cat([ordered.float(), middles, *beside, torch.tensor(SPECIAL)])[None, None]
    with interpreter.poor_casts():
        got = guarded(gpu.quantize, x, torch.ones(1, 1), dtype, False, tile=Tile(block_m=1, block_k=1024))
    assert_all_same(got, reference.quantize(x, torch.ones(1, 1), dtype, False))


def test_only_nan() -> None:
    # Of the size of a tile, which leaves no zero around it.
    x, tile = torch.full((1, 4, 8), torch.nan), Tile(block_m=4, block_k=8)
    data, data_t, amax = guarded(gpu.quantize, x, torch.ones(1, 1), E5M2, True, tile=tile)
    assert data.float().isnan().all()
    assert data_t.float().isnan().all()
    assert amax.item() == 0.0
    assert gpu.amax(x, tile=tile).item() == 0.0
