"""The guard sees what it is there for."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.interpreted.guarded import assert_one_step, assert_same, guarded
from tests.kernels.interpreted.inputs import E4M3


@triton.jit
def store_kernel(y_ptr, at):
    tl.store(y_ptr + at, 1.0)


def fill_at(x: torch.Tensor, at: int) -> torch.Tensor:
    y = torch.empty((4,), dtype=torch.float32, device=x.device)
    store_kernel[(1,)](y, at)
    return y


@pytest.mark.parametrize("at", [0, 3])
def test_a_write_inside_passes(at: int) -> None:
    assert guarded(fill_at, torch.zeros(1), at)[at] == 1.0


@pytest.mark.parametrize(("at", "complaint"), [(-1, "before the beginning"), (4, "past the end")])
def test_a_write_outside_is_seen(at: int, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        guarded(fill_at, torch.zeros(1), at)


def test_a_change_of_an_argument_is_seen() -> None:
    with pytest.raises(AssertionError, match="an argument has changed"):
        guarded(lambda x: store_kernel[(1,)](x, 0), torch.zeros(3))


@pytest.mark.parametrize("other", [[1.0, -2.0, 0.0], [1.0, -2.25, -0.0], [torch.nan, -2.0, -0.0]])
def test_what_is_not_the_same(other: list[float]) -> None:
    x = torch.tensor([1.0, -2.0, -0.0]).to(E4M3)
    with pytest.raises(AssertionError):
        assert_same(x, torch.tensor(other).to(E4M3))


def test_what_is_one_step_apart() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, 448.0]).to(E4M3)
    assert_one_step(x, torch.tensor([1.125, -2.25, -(2.0**-9), 416.0]).to(E4M3))
    with pytest.raises(AssertionError):
        assert_one_step(x, torch.tensor([1.25, -2.0, 0.0, 448.0]).to(E4M3))
