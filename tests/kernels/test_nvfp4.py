"""`quantize_nvfp4`: four bits with two levels of scales, against the oracle; stochastic rounding; the transform."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn import kernels
from tests.helpers import assert_disjoint
from tests.kernels import checks, golden, inputs
from tests.kernels import numpy_oracle as oracle

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_ROWS = st.sampled_from([1, 16])


def _values(x: torch.Tensor) -> list[float]:
    """What four-bit codes stand for, without scales."""
    return oracle.decode(checks.array(x), oracle.E2M1).tolist()


@given(x=inputs.tensors(), block_rows=BLOCK_ROWS, transpose=st.booleans())
def test_any_tensor(x: torch.Tensor, block_rows: int, transpose: bool) -> None:
    checks.check_quantize_nvfp4(kernels.quantize_nvfp4, x, block_rows=block_rows, transpose=transpose)


@given(x=inputs.tensors(), seed=inputs.SEEDS, block_rows=BLOCK_ROWS, transpose=st.booleans())
def test_any_tensor_with_noise(x: torch.Tensor, seed: int, block_rows: int, transpose: bool) -> None:
    noise = torch.from_numpy(np.asarray(np.random.default_rng(seed).random(tuple(x.shape), np.float32)))
    checks.check_quantize_nvfp4(kernels.quantize_nvfp4, x, block_rows=block_rows, noise=noise, transpose=transpose)


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("shape", [(), (3,), (0, 5), (5, 0), (1, 1), (17, 33), (2, 9, 48)], ids=str)
def test_shapes_and_layouts(shape: tuple[int, ...], block_rows: int, layout: str) -> None:
    x = inputs.lay_out(inputs.values(shape, torch.bfloat16, "rows apart", 3), layout)
    checks.check_quantize_nvfp4(kernels.quantize_nvfp4, x, block_rows=block_rows, transpose=True)


@pytest.mark.parametrize("block_rows", [1, 16])
def test_every_bfloat16_value(block_rows: int) -> None:
    x = inputs.every_bfloat16()
    shuffled = x.flatten()[torch.randperm(x.numel())].view_as(x)
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
    for one in (x, shuffled, finite, finite.clamp(-2688, 2688)):
        checks.check_quantize_nvfp4(kernels.quantize_nvfp4, one, block_rows=block_rows, transpose=True)


@pytest.mark.parametrize(("value", "expected"), golden.E2M1_TIES)
def test_ties_go_to_the_even_code(value: float, expected: float) -> None:
    """The scale of the tensor is 1 with an amax of 448 * 6, that of a block with an amax of 6 is 1 as well."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17], x[0, 18] = 448 * 6, 6, min(value, 6), -min(value, 6)
    q = checks.check_quantize_nvfp4(kernels.quantize_nvfp4, x)
    assert q.scale_inv.float().tolist() == [[448, 1]]
    assert _values(q.data[0, 16:19]) == [6, expected, -expected]


def test_scales_of_two_levels() -> None:
    x = torch.zeros(2, 32)
    x[0, 0], x[0, 31], x[1, 5] = 1344, -3, 1e-30
    q = checks.check_quantize_nvfp4(kernels.quantize_nvfp4, x)
    assert float(q.amax) == 1344  # so the tensor is scaled by 2
    assert q.scale_inv.float().tolist() == [[448, 1], [0, 0]]
    assert _values(q.data[0, [0, 31]]) == [6, -6]


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 1.0, 3.4e38])
def test_tensors_of_any_magnitude(amax: float) -> None:
    x = torch.linspace(-1, 1, 64).reshape(2, 32) * amax
    for block_rows in (1, 16):
        q = checks.check_quantize_nvfp4(kernels.quantize_nvfp4, x, block_rows=block_rows, transpose=True)
        assert kernels.dequantize(q).isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_its_block(bad: float) -> None:
    x = torch.ones(2, 48)
    x[1, 20] = bad
    q = checks.check_quantize_nvfp4(kernels.quantize_nvfp4, x, transpose=True)
    back = kernels.dequantize(q)
    assert back[1, 16:32].isnan().all()
    assert back[0].isfinite().all()
    assert back[1, :16].isfinite().all()
    assert kernels.dequantize(kernels.quantize_nvfp4(x, block_rows=16))[:, 16:32].isnan().all()


@given(x=inputs.tensors(kinds=("normal", "finite bits", "zeros", "rows apart")), block_rows=BLOCK_ROWS)
def test_dequantize(x: torch.Tensor, block_rows: int) -> None:
    q = kernels.quantize_nvfp4(x, block_rows=block_rows, transpose=True)
    rows, columns = checks.matrix(x).shape
    wide = oracle.dequantize_nvfp4(
        checks.array(q.data).reshape(rows, columns), checks.array(q.scale_inv), checks.array(q.amax)
    )
    for out in inputs.DTYPES:
        actual = kernels.dequantize(q, out)
        assert actual.dtype == out
        expected = checks.array(torch.from_numpy(wide).to(out)).reshape(x.shape)
        checks.assert_arrays_equal(checks.array(actual), expected, "dequantized")
    wide = oracle.dequantize_nvfp4(checks.array(q.data_t), checks.array(q.scale_inv_t), checks.array(q.amax))
    checks.assert_arrays_equal(checks.array(kernels.dequantize(q.mT)), wide, "dequantized transpose")


@given(seed=inputs.SEEDS, block_rows=BLOCK_ROWS)
def test_quantizing_what_was_dequantized_changes_nothing(seed: int, block_rows: int) -> None:
    """Where the largest value of the tensor and of each block is representable: then the scales come out the same."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (32, 48)).astype(np.uint8)
    codes[::block_rows, ::16] = 7
    scale = np.repeat(2.0 ** rng.integers(-3, 4, (32 // block_rows, 3)), block_rows, 0).repeat(16, 1)
    x = oracle.decode(codes, oracle.E2M1) * scale.astype(np.float32)
    x[0, 0] = 448 * 6
    first = kernels.dequantize(kernels.quantize_nvfp4(torch.from_numpy(x), block_rows=block_rows))
    second = kernels.dequantize(kernels.quantize_nvfp4(first, block_rows=block_rows))
    checks.assert_arrays_equal(checks.array(second), checks.array(first), "dequantized")


def test_round_trip_is_within_the_precision_of_four_bits() -> None:
    x = torch.rand(64, 64) * 2 - 1
    for block_rows in (1, 16):
        back = kernels.dequantize(kernels.quantize_nvfp4(x, block_rows=block_rows))
        # Half of the widest step, 4 to 6, of a block whose 6 stands for 1 at most; and the rounding of its scale.
        torch.testing.assert_close(back, x, rtol=0.25, atol=0.125)


def test_noise_rounds_up_as_often_as_the_remainder_says() -> None:
    x = torch.zeros(4096, 16)
    x[:, 0], x[:, 1] = 6, 1.125  # a quarter of the way from 1 to 1.5
    x[0, 0] = 6
    q = kernels.quantize_nvfp4(x, noise=torch.rand(4096, 16))
    share = (torch.tensor(_values(q.data[:, 1])) == 1.5).float().mean()
    assert abs(float(share) - 0.25) < 0.03
    assert q.data[:, 0].eq(7).all()
    assert q.data[:, 2:].eq(0).all()


@pytest.mark.parametrize(("noise", "expected"), [(0.0, 1.5), (0.249, 1.5), (0.25, 1.0), (0.999, 1.0)])
def test_noise_below_the_remainder_rounds_away_from_zero(noise: float, expected: float) -> None:
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([6, 1.125, -1.125])
    q = kernels.quantize_nvfp4(x, noise=torch.full((1, 16), noise))
    assert _values(q.data[0, 1:3]) == [expected, -expected]


@given(x=inputs.tensors(), block_rows=BLOCK_ROWS)
def test_inputs_stay_and_outputs_are_new_memory(x: torch.Tensor, block_rows: int) -> None:
    noise = torch.rand(x.shape)
    before = copy.deepcopy((x, noise))
    q = kernels.quantize_nvfp4(x, block_rows=block_rows, noise=noise, transpose=True)
    kernels.dequantize(q)
    for one, other in zip((x, noise), before, strict=True):
        checks.assert_arrays_equal(checks.array(one), checks.array(other), "input")
    assert_disjoint(x, noise, *q)


@pytest.mark.parametrize("block_rows", [1, 16])
def test_a_product_of_four_bits_is_that_of_what_they_stand_for(block_rows: int) -> None:
    x, w = torch.randn(5, 48), torch.randn(7, 48)
    a, b = kernels.quantize_nvfp4(x), kernels.quantize_nvfp4(w, block_rows=block_rows)
    exact = kernels.dequantize(a).double() @ kernels.dequantize(b).double().mT
    y = kernels.scaled_mm(a, b.mT, out_dtype=torch.float32)
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-4)


@given(shape=st.sampled_from([(16,), (3, 16), (2, 3, 48), (0, 32), (4, 0)]), seed=inputs.SEEDS)
def test_the_transform_is_the_matrix_of_its_definition(shape: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(-8, 9, shape).astype(np.float32)
    signs = rng.choice(np.float32([-1, 1]), 16)
    expected = (x.reshape(-1, 16) * signs @ oracle.hadamard()).reshape(shape)
    actual = kernels.hadamard_16(torch.from_numpy(x), torch.from_numpy(signs))
    checks.assert_arrays_equal(checks.array(actual), expected, "transformed")


def test_the_transform_is_orthogonal_and_keeps_products() -> None:
    signs = torch.where(torch.rand(16) < 0.5, -1.0, 1.0).double()
    x, w = torch.randn(5, 64, dtype=torch.float64), torch.randn(6, 64, dtype=torch.float64)
    matrix = kernels.hadamard_16(torch.eye(16, dtype=torch.float64), signs)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-15)
    product = kernels.hadamard_16(x, signs) @ kernels.hadamard_16(w, signs).mT
    torch.testing.assert_close(product, x @ w.mT, rtol=1e-12, atol=1e-12)
