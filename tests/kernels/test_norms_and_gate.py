"""Norms and the gate, each with the quantization that follows: every code within the bound of float32 arithmetic."""

from __future__ import annotations

import copy

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
KINDS = ("normal", "zeros", "ties", "rows apart")
SCALES = st.sampled_from([1.0, 0.375, 100.0, 1e-4, 1e6, 2.0**-60, 1e30])
SIZES = tuple(size for size in inputs.SIZES if size)


def _row(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return inputs.values((length,), dtype, "normal", seed) / 100


@given(
    x=inputs.tensors(kinds=KINDS, min_dims=1, sizes=SIZES),
    weight_dtype=st.sampled_from(inputs.DTYPES),
    seed=inputs.SEEDS,
    scale=SCALES,
    eps=st.sampled_from([1e-6, 1e-5, 1e-2]),
    dtype=FP8,
    transpose=st.booleans(),
)
def test_rms_norm(
    x: torch.Tensor,
    weight_dtype: torch.dtype,
    seed: int,
    scale: float,
    eps: float,
    dtype: torch.dtype,
    transpose: bool,
) -> None:
    weight = _row(x.shape[-1], weight_dtype, seed)
    checks.check_rms_norm_quantize(
        kernels.rms_norm_quantize, x, weight, torch.tensor(scale), dtype, eps=eps, transpose=transpose
    )


@given(
    x=inputs.tensors(kinds=KINDS, min_dims=1, sizes=SIZES),
    row_dtypes=st.tuples(st.sampled_from(inputs.DTYPES), st.sampled_from(inputs.DTYPES)),
    seed=inputs.SEEDS,
    scale=SCALES,
    eps=st.sampled_from([1e-6, 1e-5, 1e-2]),
    dtype=FP8,
    transpose=st.booleans(),
)
def test_layer_norm(
    x: torch.Tensor,
    row_dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
    scale: float,
    eps: float,
    dtype: torch.dtype,
    transpose: bool,
) -> None:
    weight, bias = (_row(x.shape[-1], one, seed + index) for index, one in enumerate(row_dtypes))
    checks.check_layer_norm_quantize(
        kernels.layer_norm_quantize, x, weight, bias, torch.tensor(scale), dtype, eps=eps, transpose=transpose
    )


@given(
    gate=inputs.tensors(kinds=(*KINDS, "finite bits", "tiny"), min_dims=1),
    seed=inputs.SEEDS,
    scale=SCALES,
    dtype=FP8,
    transpose=st.booleans(),
    layout=st.sampled_from(inputs.LAYOUTS),
)
def test_silu_gate(
    gate: torch.Tensor, seed: int, scale: float, dtype: torch.dtype, transpose: bool, layout: str
) -> None:
    up = inputs.lay_out(inputs.values(tuple(gate.shape), gate.dtype, "normal", seed), layout)
    checks.check_silu_gate_quantize(
        kernels.silu_gate_quantize, gate, up, torch.tensor(scale), dtype, transpose=transpose
    )


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
@pytest.mark.parametrize("shape", [(1,), (1, 1), (0, 5), (3, 0), (0, 0), (3, 2, 33), (129, 130)], ids=str)
def test_shapes_and_layouts(shape: tuple[int, ...], layout: str) -> None:
    x = inputs.lay_out(inputs.values(shape, torch.bfloat16, "normal", 1), layout)
    weight, bias = (inputs.lay_out(_row(shape[-1], torch.float32, seed), layout) for seed in (2, 3))
    scale, dtype = torch.tensor(4.0), torch.float8_e4m3fn
    checks.check_silu_gate_quantize(kernels.silu_gate_quantize, x, x, scale, dtype, transpose=True)
    if shape[-1] == 0:
        for q in (
            kernels.rms_norm_quantize(x, weight, scale, dtype, transpose=True)[0],
            kernels.layer_norm_quantize(x, weight, bias, scale, dtype, transpose=True)[0],
        ):
            assert q.data.shape == x.shape
            assert float(q.amax) == 0
        return
    checks.check_rms_norm_quantize(kernels.rms_norm_quantize, x, weight, scale, dtype, transpose=True)
    checks.check_layer_norm_quantize(kernels.layer_norm_quantize, x, weight, bias, scale, dtype, transpose=True)


@pytest.mark.parametrize("x_dtype", inputs.DTYPES, ids=str)
def test_statistics_have_one_entry_for_each_row(x_dtype: torch.dtype) -> None:
    x, one = torch.randn(2, 3, 8).to(x_dtype), torch.ones(8)
    _, rstd = kernels.rms_norm_quantize(x, one, torch.tensor(1.0), torch.float8_e4m3fn)
    _, mean, deviation = kernels.layer_norm_quantize(x, one, one, torch.tensor(1.0), torch.float8_e4m3fn)
    assert len({tuple(rstd.shape), tuple(mean.shape), tuple(deviation.shape)}) == 1
    assert rstd.numel() == 6


@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_the_result_is_not_rounded_to_the_dtype_of_x_in_between(dtype: torch.dtype) -> None:
    """A value that bfloat16 would round onto a tie, and so to another code."""
    codes = inputs.FORMATS[dtype].magnitudes()
    tie = (codes[40] + codes[41]) / 2
    up = torch.tensor([[tie]]).float().expand(4, 64)
    nudge = torch.tensor([[1 - 2.0**-12], [1 + 2.0**-12], [1 - 2.0**-10], [1 + 2.0**-10]])
    gate = torch.full((4, 64), 100.0).bfloat16()  # silu(100) is 100
    q = kernels.silu_gate_quantize(gate.float(), up * nudge / 100, torch.tensor(1.0), dtype)
    assert q.data.view(torch.uint8)[:, 0].tolist() == [40, 41, 40, 41]
    x = torch.full((1, 64), 3.0, dtype=torch.bfloat16)
    for factor, code in ((1 - 2.0**-12, 40), (1 + 2.0**-12, 41)):
        weight = torch.full((64,), float(tie * factor))
        q, _ = kernels.rms_norm_quantize(x, weight, torch.tensor(1.0), dtype, eps=0.0)
        assert q.data.view(torch.uint8).eq(code).all()
        q, _, _ = kernels.layer_norm_quantize(x, weight, weight, torch.tensor(1.0), dtype)
        assert q.data.view(torch.uint8).eq(code).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", inputs.FP8, ids=str)
def test_what_is_not_finite_shows_in_its_row_only(dtype: torch.dtype, bad: float) -> None:
    x, one, scale = torch.randn(4, 32), torch.ones(32), torch.tensor(1.0)
    x[2, 5] = bad
    rms = kernels.rms_norm_quantize(x, one, scale, dtype)[0]
    layer = kernels.layer_norm_quantize(x, one, one, scale, dtype)[0]
    gate = kernels.silu_gate_quantize(x, torch.ones_like(x), scale, dtype)
    up = kernels.silu_gate_quantize(torch.ones_like(x), x, scale, dtype)
    for q in (rms, layer, gate, up):
        poisoned = kernels.dequantize(q).isnan()
        assert poisoned[2, 5] or (q is gate and bad == -torch.inf)
        assert not poisoned[[0, 1, 3]].any()
        rest = kernels.dequantize(q)[[0, 1, 3]]
        assert rest.isfinite().all()
    assert kernels.dequantize(layer)[2].isnan().all()


def test_amax_is_of_the_result_before_scaling() -> None:
    x = torch.tensor([[3.0, -4.0]])
    q, rstd = kernels.rms_norm_quantize(x, torch.tensor([1.0, 10.0]), torch.tensor(7.0), torch.float8_e4m3fn, eps=0.0)
    torch.testing.assert_close(rstd.flatten(), torch.tensor([1 / 12.5**0.5]), rtol=3e-7, atol=0)
    torch.testing.assert_close(q.amax, torch.tensor(40 / 12.5**0.5), rtol=3e-7, atol=0)
    gate = kernels.silu_gate_quantize(
        torch.tensor([[50.0]]), torch.tensor([[-3.0]]), torch.tensor(7.0), torch.float8_e5m2
    )
    assert float(gate.amax) == 150


def test_defaults_are_the_usual_epsilons() -> None:
    x, one, scale = torch.full((1, 4), 1e-3), torch.ones(4), torch.tensor(1.0)
    _, rstd = kernels.rms_norm_quantize(x, one, scale, torch.float8_e4m3fn)
    np.testing.assert_allclose(rstd.numpy().ravel(), [1 / (2e-6) ** 0.5], rtol=1e-6)
    _, _, deviation = kernels.layer_norm_quantize(x, one, one, scale, torch.float8_e4m3fn)
    np.testing.assert_allclose(deviation.numpy().ravel(), [1 / 1e-5**0.5], rtol=1e-6)


@given(x=inputs.tensors(kinds=("normal",), min_dims=1, sizes=SIZES), dtype=FP8)
def test_inputs_stay_and_outputs_are_new_memory(x: torch.Tensor, dtype: torch.dtype) -> None:
    weight, bias, scale = torch.ones(x.shape[-1]), torch.zeros(x.shape[-1]), torch.tensor(1.0)
    before = copy.deepcopy((x, weight, bias, scale))
    rms, rstd = kernels.rms_norm_quantize(x, weight, scale, dtype, transpose=True)
    layer, mean, deviation = kernels.layer_norm_quantize(x, weight, bias, scale, dtype, transpose=True)
    gate = kernels.silu_gate_quantize(x, x, scale, dtype, transpose=True)
    for one, other in zip((x, weight, bias, scale), before, strict=True):
        checks.assert_arrays_equal(checks.array(one), checks.array(other), "input")
    new = [leaf for q in (rms, layer, gate) for leaf in (q.data, q.data_t, q.amax, q.scale_inv)]
    assert_disjoint(x, weight, bias, scale, new, rstd, mean, deviation)
