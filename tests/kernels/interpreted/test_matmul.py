"""Products with scales, against float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scoped_fn.kernels._tiles import Tile
from scoped_fn.kernels.gpu import matmul as gpu
from tests.kernels.interpreted import expected
from tests.kernels.interpreted.guarded import guarded
from tests.kernels.interpreted.inputs import E4M3, E5M2, arranged, arrangements, float_dtypes, fp8_dtypes, seeds

# Half a step of the result's format, relative to it.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# More than one tile of each in every direction.
SMALL = Tile(block_m=32, block_n=32, block_k=128, group=2, epilogue=2)

batches = st.sampled_from((1, 1, 1, 2, 3, 0))
sizes = st.sampled_from((0, 1, 16, 31, 64, 130, 257))
inner_sizes = st.sampled_from((0, 1, 16, 100, 128, 144, 272, 300))
row_blocks = st.sampled_from((0, 1, 128))
tiles = st.sampled_from((None, SMALL))


def count(size: int, block: int) -> int:
    return -(-size // block) if block else 1


def fp8_numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def positive(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def check(a, b, scale_a, scale_b, blocks_a, blocks_b, bias, dtype, fast, tile=None):
    y = guarded(gpu.scaled_mm, a, b, scale_a, scale_b, bias, dtype, fast, tile=tile)
    full_a = expected.spread(scale_a, *blocks_a, a.shape)
    full_b = expected.spread(scale_b, *blocks_b, b.shape)
    wanted, size = expected.scaled_mm(a, b, full_a, full_b, bias)
    assert y.shape == wanted.shape
    assert y.dtype == dtype
    # Each of K products of numbers that are exact in float32, scaled twice and added, then the bias: K + 4 roundings
    # of 2^-24 each at most, of no more than the sum of the magnitudes; and one rounding of the result, where 2^-25 is
    # half a step of float16 near 0.
    bound = (a.shape[2] + 4) * 2.0**-24 * size + ROUNDING[dtype] * wanted.abs() * 1.01 + 2.0**-25
    assert ((y.double() - wanted).abs() <= bound).all()


@given(
    batches,
    sizes,
    sizes,
    inner_sizes,
    fp8_dtypes,
    fp8_dtypes,
    float_dtypes,
    row_blocks,
    row_blocks,
    st.booleans(),
    st.booleans(),
    arrangements,
    arrangements,
    st.booleans(),
    st.booleans(),
    tiles,
    seeds,
)
def test_scaled_mm(m_batch, m, n, k, fp8_a, fp8_b, dtype, r_a, r_b, c_a, c_b, how_a, how_b, bias, fast, tile, seed):
    a = arranged(fp8_numbers((m_batch, m, k), fp8_a, seed), how_a)
    b = arranged(fp8_numbers((m_batch, n, k), fp8_b, seed + 1), how_b)
    k_a, k_b = 128 * c_a, 128 * c_b
    scale_a = positive((m_batch, count(k, k_a), count(m, r_a)), seed).mT
    scale_b = positive((m_batch, count(n, r_b), count(k, k_b)), seed)
    blocks_a, blocks_b = (r_a or max(m, 1), k_a or max(k, 1)), (r_b or max(n, 1), k_b or max(k, 1))
    bias = torch.randn(n, m_batch).to(torch.float16).mT if bias else None
    check(a, b, scale_a, scale_b, blocks_a, blocks_b, bias, dtype, fast, tile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("epilogue", [1, 2])
def test_tensor_descriptors(dtype: torch.dtype, epilogue: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = fp8_numbers((1, 80, 272), E4M3, 0), fp8_numbers((1, 96, 272), E5M2, 1)
    monkeypatch.delattr(gpu, "scaled_mm_kernel")
    tile = Tile(block_m=32, block_n=64, block_k=64, group=2, epilogue=epilogue)
    check(a, b, positive((1, 80, 1), 2), positive((1, 1, 1), 3), (1, 272), (96, 272), None, dtype, True, tile)


@pytest.mark.parametrize("rows_of_b", [1, 128])
@pytest.mark.parametrize("block_n", [64, 256])
def test_a_tile_in_one_block_of_b_or_in_two(rows_of_b: int, block_n: int) -> None:
    a, b = fp8_numbers((1, 32, 384), E4M3, 0), fp8_numbers((1, 256, 384), E4M3, 1)
    tile = Tile(block_m=32, block_n=block_n, block_k=128)
    scale_b = positive((1, 256 // rows_of_b, 3), 3)
    blocks = (1, 128), (rows_of_b, 128)
    check(a, b, positive((1, 32, 3), 2), scale_b, *blocks, None, torch.float32, False, tile)


@pytest.mark.parametrize("arch", ["cuda:89", "hip:gfx942"])
def test_without_tensor_descriptors(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "arch_of", lambda x: arch)
    monkeypatch.delattr(gpu, "scaled_mm_tma_kernel")
    a, b = fp8_numbers((1, 70, 144), E4M3, 0), fp8_numbers((1, 96, 144), E4M3, 1)
    check(a, b, positive((1, 1, 2), 2), positive((1, 1, 2), 3), (70, 128), (96, 128), None, torch.bfloat16, False)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_reaches_its_row_only(code: int) -> None:
    a, b = fp8_numbers((1, 32, 128), E4M3, 0), fp8_numbers((1, 16, 128), E4M3, 1)
    a.view(torch.uint8)[0, 3, 5] = code
    y = gpu.scaled_mm(a, b, torch.ones(1, 1, 1), torch.ones(1, 1, 1), None, torch.float32, False)
    assert torch.equal(y.isnan().all(-1), y.isnan().any(-1))
    assert y.isnan().any(-1).nonzero().tolist() == [[0, 3]]
