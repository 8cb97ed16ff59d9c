"""RMSNorm and LayerNorm: codes within one step of those of a norm in float64, at once and in chunks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn.kernels._tiles import Tile
from scoped_fn.kernels.gpu import norms as gpu
from tests.kernels import interpreter
from tests.kernels.interpreted import expected
from tests.kernels.interpreted.guarded import assert_one_step, assert_same, guarded
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

tiles = st.sampled_from((None, Tile(block_m=16, block_k=32)))
# Rows are all alike: fewer of them, and more examples.
row_counts = st.sampled_from((0, 1, 2, 16, 33, 64))


def check(launcher, wanted, norm_arguments, scale, fp8, transpose, tile):
    data, data_t, amax, *statistics = guarded(launcher, *norm_arguments, scale, 1e-5, fp8, transpose, tile=tile)
    data_wanted, _, amax_wanted, *statistics_wanted = wanted(*norm_arguments, scale, 1e-5, fp8, transpose)
    assert_one_step(data, data_wanted)
    assert_same(data_t, expected.turned(data, transpose))
    torch.testing.assert_close(amax, amax_wanted, rtol=1e-4, atol=1e-5)
    for got, other in zip(statistics, statistics_wanted, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-5, equal_nan=True)


@given(batches, row_counts, sizes, float_dtypes, fp8_dtypes, arrangements, st.booleans(), tiles, seeds)
def test_rms_norm_quantize(batch, rows, columns, dtype, fp8, how, transpose, tile, seed):
    x = arranged(numbers((batch, rows, columns), dtype, seed, special=False), how)
    weight = numbers((batch, columns), torch.bfloat16, seed + 1, special=False)
    scale = torch.tensor([0.5, 3.0, 100.0])[:batch]
    check(gpu.rms_norm_quantize, expected.rms_norm_quantize, (x, weight), scale, fp8, transpose, tile)


@given(batches, row_counts, sizes, float_dtypes, fp8_dtypes, arrangements, st.booleans(), tiles, seeds)
def test_layer_norm_quantize(batch, rows, columns, dtype, fp8, how, transpose, tile, seed):
    generator = torch.Generator().manual_seed(seed)
    x = arranged((torch.randn((batch, rows, columns), generator=generator) * 3 + 5).to(dtype), how)
    # A bias of the sign of the weight, and away from 0: where y cancels, a step says nothing about the kernel.
    weight = torch.rand((batch, columns), generator=generator) / 8 + 0.1
    bias = torch.rand((columns, batch), generator=generator).mT + 3
    scale = torch.tensor([0.5, 3.0, 100.0])[:batch]
    arguments = (x, weight, bias)
    check(gpu.layer_norm_quantize, expected.layer_norm_quantize, arguments, scale, fp8, transpose, tile)


@pytest.mark.parametrize("columns", [1000, 8192, 9000])
def test_long_rows(columns: int) -> None:
    x = (torch.randn(1, 3, columns) + 2).bfloat16()
    weight, bias, scale = torch.rand(1, columns) / 8 + 0.1, torch.rand(1, columns) + 3, torch.tensor([2.0])
    check(gpu.layer_norm_quantize, expected.layer_norm_quantize, (x, weight, bias), scale, E4M3, False, None)
    check(gpu.rms_norm_quantize, expected.rms_norm_quantize, (x, weight), scale, E4M3, False, None)


@pytest.mark.parametrize("tile", [Tile(block_m=2, block_k=256), Tile(block_m=2, block_k=32)])
def test_a_mean_far_larger_than_the_deviations(tile: Tile) -> None:
    x = torch.randn(1, 5, 200) + 1000
    *_, mean, rstd = gpu.layer_norm_quantize(
        x, torch.ones(1, 200), torch.zeros(1, 200), torch.ones(1), 1e-5, E4M3, False, tile=tile
    )
    torch.testing.assert_close(mean.double(), x.double().mean(-1), rtol=1e-6, atol=0.0)
    wanted = 1 / (x.double().var(-1, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(rstd.double(), wanted, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("tile", [None, Tile(block_m=16, block_k=32)])
def test_the_bias_of_rows_past_the_end_is_no_amax(tile: Tile | None) -> None:
    x, weight, bias = torch.zeros(1, 3, 70), torch.ones(1, 70), torch.zeros(1, 70)
    # The first column is normalized to 8.3, so that y has -3.3 there, and the bias is larger than every y.
    x[:, :, 0], weight[:, 0], bias[:, 0] = 10.0, -1.0, 5.0
    check(gpu.layer_norm_quantize, expected.layer_norm_quantize, (x, weight, bias), torch.ones(1), E4M3, False, tile)


@pytest.mark.parametrize("tile", [None, Tile(block_m=16, block_k=32)])
def test_a_nan_spoils_its_row_only(tile: Tile | None) -> None:
    x = torch.randn(1, 4, 70)
    x[0, 1, 3], x[0, 2, 5] = torch.nan, torch.inf
    data, _, amax, rstd = guarded(
        gpu.rms_norm_quantize, x, torch.ones(1, 70), torch.ones(1), 1e-5, E4M3, False, tile=tile
    )
    wanted = expected.rms_norm_quantize(x, torch.ones(1, 70), torch.ones(1), 1e-5, E4M3, False)
    assert_one_step(data, wanted[0])
    torch.testing.assert_close(amax, wanted[2])
    torch.testing.assert_close(rstd, wanted[3], equal_nan=True)


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("transpose", [False, True])
def test_where_casts_are_poor_the_kernel_rounds(
    fp8: torch.dtype, transpose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "arch_of", lambda x: "hip:gfx950")
    arguments = (torch.randn(1, 33, 100), torch.ones(1, 100))
    with interpreter.poor_casts():
        got = guarded(gpu.rms_norm_quantize, *arguments, torch.tensor([1e6]), 1e-5, fp8, transpose)
    wanted = expected.rms_norm_quantize(*arguments, torch.tensor([1e6]), 1e-5, fp8, transpose)
    assert_one_step(got[0], wanted[0])
