"""The golden vectors of the public recipes, through the functions of the room."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scoped_fn import kernels
from tests.kernels import checks, golden

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MAXIMA = {"e4m3": 448.0, "e5m2": 57344.0}


def _inverse(scale: float) -> float:
    return float(np.float32(1) / np.float32(scale))


@pytest.mark.parametrize("case", golden.CURRENT, ids=str)
def test_current_scaling(case: golden.Current) -> None:
    x = torch.tensor([[0.0, -case.amax, case.amax / 2]])
    q = kernels.quantize_current(x, DTYPES[case.format], power_of_2=case.power_of_2, epsilon=case.epsilon)
    assert float(q.scale_inv) == _inverse(case.scale)
    assert float(q.amax) == np.float32(case.amax)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_current_scaling_of_nan_only_keeps_a_scale_of_one(dtype: torch.dtype) -> None:
    q = kernels.quantize_current(torch.full((2, 3), math.nan), dtype)
    assert (float(q.scale_inv), float(q.amax)) == (1, 0)
    assert kernels.dequantize(q).isnan().all()


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("case", golden.CURRENT, ids=str)
def test_block_scaling_follows_current_scaling(case: golden.Current, block_rows: int) -> None:
    x = torch.tensor([[0.0, -case.amax, case.amax / 2]])
    options = {"power_of_2": case.power_of_2, "epsilon": case.epsilon}
    q = kernels.quantize_blocks(x, DTYPES[case.format], block_rows=block_rows, **options)
    assert q.scale_inv.tolist() == [[_inverse(case.scale)]]


@pytest.mark.parametrize(("name", "amax", "byte"), golden.E8M0)
def test_mx_scales(name: str, amax: float, byte: int) -> None:
    x = torch.tensor([[0.0, -amax, math.nan]])
    assert kernels.quantize_mx(x, DTYPES[name]).scale_inv.tolist() == [[byte]]


def test_mx_scales_of_448_times_each_power_of_two() -> None:
    exponents = range(-120, 120)
    x = torch.tensor([[448 * 2.0**exponent] for exponent in exponents])
    q = kernels.quantize_mx(x, torch.float8_e4m3fn)
    assert q.scale_inv[:, 0].tolist() == [127 + exponent for exponent in exponents]
    assert q.data.float().eq(448).all()


@pytest.mark.parametrize("case", golden.UPDATES, ids=str)
def test_scale_update(case: golden.Update) -> None:
    history, scale, scales = torch.tensor(case.history, dtype=torch.float32)[:, None], torch.tensor([case.scale]), []
    for amax in case.amaxes:
        staged = torch.cat([torch.tensor([[amax]]), history[1:]])
        history, scale = kernels.update_scales(
            staged, scale, fp8_max=MAXIMA[case.format], algorithm=case.algorithm, margin=case.margin
        )
        scales.append(scale.item())
    checks.assert_arrays_equal(np.float32(scales), np.float32(case.scales), "scales")
    if case.final is not None:
        assert history[:, 0].tolist() == case.final


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [31, 1024])
def test_the_history_rolls_by_one_and_the_margin_divides(length: int, algorithm: str) -> None:
    """As the public suite checks a linear function: margin 2, the newest amax last, and row 0 cleared."""
    history = torch.rand(length, 3) + 0.1
    new, scale = kernels.update_scales(
        history, torch.ones(3), fp8_max=torch.tensor([448.0, 448.0, 57344.0]), algorithm=algorithm, margin=2
    )
    expected = history.roll(-1, 0)
    amax = history.amax(0) if algorithm == "max" else history[0]
    torch.testing.assert_close(new[1:], expected[1:], rtol=0, atol=0)
    assert new[0].eq(0).all()
    torch.testing.assert_close(scale, torch.tensor([448.0, 448.0, 57344.0]) / 4 / amax, rtol=0, atol=0)


@pytest.mark.parametrize("x", [0.25, 1.25, 2.25, 3.25])
def test_a_tensor_quantized_with_the_scale_of_its_history(x: float) -> None:
    """The step after the update: constant tensors fill the range, divided by the margin."""
    _, scale = kernels.update_scales(torch.tensor([[x], [0.0]]), torch.ones(1), fp8_max=448.0, margin=2)
    q = kernels.quantize(torch.full((4, 4), x), scale[0], torch.float8_e4m3fn)
    assert q.data.float().eq(112).all()
    torch.testing.assert_close(kernels.dequantize(q), torch.full((4, 4), x), rtol=2e-7, atol=0)


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_blocks_of_zeros_and_of_the_largest_value(x_dtype: torch.dtype, dtype: torch.dtype, block_rows: int) -> None:
    largest = torch.finfo(x_dtype).max
    x = torch.zeros(128, 256, dtype=x_dtype)
    x[:, 128:] = largest
    exact = np.float32(torch.finfo(dtype).max) / np.float32(largest)
    power = np.float32(2.0 ** np.floor(np.log2(np.float64(exact))))
    for power_of_2, scale in ((False, exact), (True, power)):
        q = kernels.quantize_blocks(x, dtype, block_rows=block_rows, power_of_2=power_of_2)
        assert q.scale_inv[:, 0].eq(1).all()
        assert q.scale_inv[:, 1].eq(_inverse(scale)).all()


@pytest.mark.parametrize("power_of_2", [False, True])
def test_a_linear_function_in_current_scaling_is_near_that_of_bfloat16(power_of_2: bool) -> None:
    """The sizes of the public suite. Rounding errs by 2.7% (e4m3) and 5.3% (e5m2) of a number, root mean square."""
    x, w, dy = (torch.randn(shape).bfloat16() for shape in ((16, 256), (128, 256), (16, 128)))
    a, b = (kernels.quantize_current(one, torch.float8_e4m3fn, power_of_2=power_of_2, transpose=True) for one in (x, w))
    g = kernels.quantize_current(dy, torch.float8_e5m2, power_of_2=power_of_2, transpose=True)
    products = (
        (kernels.scaled_mm(a, b.mT), x @ w.mT, 0.045),
        (kernels.scaled_mm(g, b), dy @ w, 0.075),
        (kernels.scaled_mm(g.mT, a), dy.mT @ x, 0.075),
    )
    for actual, expected, limit in products:
        assert (actual - expected).float().norm() < limit * expected.float().norm()
