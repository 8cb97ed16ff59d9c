"""Operators as operations that a compiler can fuse: the same bits as the operators."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn.kernels import FUSIBLE
from scoped_fn.kernels import _ops as ops

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 448.0, 464.0, 1e30, 1e-30, 2.0**-9, 2.0**-10, -17.0]


def assert_same_bits(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)
        finite = ~theirs.float().isnan()
        assert torch.equal(ours.float().signbit()[finite], theirs.float().signbit()[finite])


def matrix(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).repeat(6).reshape(1, 6, -1).to(dtype)


numbers = st.lists(st.one_of(st.floats(width=32), st.sampled_from(SPECIAL)), min_size=1, max_size=9)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
formats = st.sampled_from([E4M3, E5M2])


@given(numbers, dtypes, formats, st.floats(2.0**-20, 2.0**20, width=32))
def test_quantize(values: list[float], dtype: torch.dtype, fp8: torch.dtype, scale: float) -> None:
    arguments = (matrix(values, dtype), torch.tensor([[scale]]), fp8, False)
    assert_same_bits(FUSIBLE[ops.quantize](*arguments), ops.quantize(*arguments))


@given(numbers, dtypes, formats, st.sampled_from([0.0, 1e-3]))
def test_quantize_current(values: list[float], dtype: torch.dtype, fp8: torch.dtype, epsilon: float) -> None:
    arguments = (matrix(values, dtype), fp8, False, epsilon, False)
    assert_same_bits(FUSIBLE[ops.quantize_current](*arguments), ops.quantize_current(*arguments))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_scaled_mm(batch: int, shared: bool, with_bias: bool) -> None:
    a, b = torch.randn(batch, 5, 40).mul(9).to(E4M3), torch.randn(batch, 3, 40).mul(9).to(E5M2)
    b = b[:1].expand(batch, 3, 40) if shared else b
    bias = torch.randn(batch, 3) if with_bias else None
    arguments = (a, b, torch.rand(batch, 5, 1) + 0.5, torch.rand(batch, 1, 1) + 0.5, bias, torch.float32, False)
    torch.testing.assert_close(FUSIBLE[ops.scaled_mm](*arguments), ops.scaled_mm(*arguments), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (ops.quantize, (torch.ones(1, 2, 3), torch.ones(1, 1), E4M3, True)),
        (ops.quantize, (torch.ones(1, 0, 3), torch.ones(1, 1), E4M3, False)),
        (ops.quantize_current, (torch.ones(1, 2, 3), E4M3, True, 0.0, False)),
        (ops.scaled_mm, (*[torch.ones(1, 2, 3).to(E4M3)] * 2, *[torch.ones(1, 1, 1)] * 2, None, torch.bfloat16, False)),
        (
            ops.scaled_mm,
            (*[torch.ones(1, 2, 300).to(E4M3)] * 2, *[torch.ones(1, 2, 3)] * 2, None, torch.float32, False),
        ),
    ],
)
def test_what_has_no_such_form_is_left_to_the_operator(op: Any, arguments: tuple) -> None:
    assert FUSIBLE[op](*arguments) is NotImplemented
    assert op(*arguments) is not None


def test_inductor_keeps_the_bits() -> None:
    x = torch.tensor(SPECIAL).repeat(40).reshape(1, 20, 24) * torch.linspace(0.5, 2, 24)
    arguments = (x, torch.tensor([[3.0]]), E4M3, False)
    compiled = torch.compile(FUSIBLE[ops.quantize])
    assert_same_bits(compiled(*arguments), ops.quantize(*arguments))
