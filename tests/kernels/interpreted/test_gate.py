"""The SiLU gate: codes within one step of those of torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn.kernels.gpu import gate as gpu
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


@given(batches, sizes, sizes, float_dtypes, fp8_dtypes, arrangements, arrangements, st.booleans(), seeds)
def test_silu_gate_quantize(batch, rows, columns, dtype, fp8, how_gate, how_up, transpose, seed):
    gate = arranged(numbers((batch, rows, columns), dtype, seed, special=False), how_gate)
    up = arranged(numbers((batch, rows, columns), dtype, seed + 1), how_up)
    scale = torch.tensor([0.5, 3.0, 100.0])[:batch]
    data, data_t, amax = guarded(gpu.silu_gate_quantize, gate, up, scale, fp8, transpose)
    wanted, _, wanted_amax = expected.silu_gate_quantize(gate, up, scale, fp8, transpose)
    assert_one_step(data, wanted)
    assert_same(data_t, expected.turned(data, transpose))
    torch.testing.assert_close(amax, wanted_amax, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_gates_far_from_zero(fp8: torch.dtype) -> None:
    gate = torch.tensor([-torch.inf, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 3e38, torch.inf, torch.nan])[None, None]
    got = guarded(gpu.silu_gate_quantize, gate, torch.ones_like(gate), torch.ones(1), fp8, False)
    assert_one_step(got[0], expected.silu_gate_quantize(gate, torch.ones_like(gate), torch.ones(1), fp8, False)[0])


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_where_casts_are_poor_the_kernel_rounds(fp8: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "arch_of", lambda x: "hip:gfx950")
    gate, up, scale = torch.randn(1, 33, 100), torch.randn(1, 33, 100), torch.tensor([1e6])
    with interpreter.poor_casts():
        data, _, _ = guarded(gpu.silu_gate_quantize, gate, up, scale, fp8, False)
    assert_one_step(data, expected.silu_gate_quantize(gate, up, scale, fp8, False)[0])
