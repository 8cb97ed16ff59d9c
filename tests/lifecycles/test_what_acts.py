"""What draws, writes or cannot be looked into runs once and in its place, under every pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf
from tests.helpers import assert_same

BUDGET, ORDER, OFFLOAD = sf.passes.memory_budget(0.0), sf.passes.order_for_memory(), sf.passes.offload_saved(2**30)
PASSES = [BUDGET, ORDER, OFFLOAD, [BUDGET, ORDER, OFFLOAD]]


@torch.library.custom_op("scoped_fn_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draws, and does not say so."""
    return torch.rand_like(x)


noisy.register_fake(torch.empty_like)


def drop_inside(h: Tensor) -> Tensor:
    return torch.cond(h.sum() > -1e9, lambda h: functional.dropout(h, 0.5) * 2, lambda h: h.sin(), (h,))


def drop_twice(h: Tensor) -> Tensor:
    return checkpoint(lambda h: functional.dropout(h.sin(), 0.5).cos(), h, use_reentrant=False) + torch.rand_like(h)


def drop_opaque(h: Tensor) -> Tensor:
    return h * noisy(h.detach())


class DrawsInBackward(torch.autograd.Function):
    """Its backward draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x.cos() * (1 + torch.rand(x.shape, dtype=x.dtype))


def draw_in_backward(h: Tensor) -> Tensor:
    result: Tensor = DrawsInBackward.apply(h)  # type: ignore[no-untyped-call]
    return result


class Net(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 64), middle, nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(x).tanh()).exp().tanh())
        return result


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:Expected at most 0 saved bytes", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("passes", PASSES, ids=str)
@pytest.mark.parametrize("middle", [drop_inside, drop_twice, drop_opaque, draw_in_backward])
def test_gradients_are_those_of_eager(middle: Callable[[Tensor], Tensor], passes: Any) -> None:
    model, x = Net(middle).double(), torch.randn(8, 6).double()
    state, fn = sf.compile(sf.init_state(), model, (x,), backend="eager", rng="torch", passes=passes)
    params = list(model.parameters())
    torch.manual_seed(5)
    expected = torch.autograd.grad(model(x).square().sum(), params)
    after = torch.rand(1)
    torch.manual_seed(5)
    got = torch.autograd.grad(fn(state, fn.params, x)[1].square().sum(), list(fn.params.values()))
    assert_same(got, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.rand(1), after), "as many numbers were drawn"


def test_random_numbers_inside_a_branch_come_from_the_key() -> None:
    x = torch.randn(8, 6)
    state, fn = sf.compile(sf.init_state(), Net(drop_inside), (x,), backend="eager")
    before = torch.get_rng_state()
    first, second = fn(state, fn.params, x)[1], fn(state, fn.params, x)[1]
    assert torch.equal(before, torch.get_rng_state())
    assert_same(first, second)
    assert not torch.equal(first, fn(fn(state, fn.params, x)[0], fn.params, x)[1])


def test_a_backward_that_draws_is_left_out_with_its_output() -> None:
    def two(w: Tensor) -> tuple[Tensor, Tensor]:
        return draw_in_backward(w).sum(), draw_in_backward(w.tanh()).sum()

    w = torch.randn(5, requires_grad=True)
    state, fn = sf.compile(sf.init_state(), two, (w,), backend="eager", rng="torch")
    torch.manual_seed(3)
    expected = torch.autograd.grad(two(w)[0], w), torch.rand(1)
    torch.manual_seed(3)
    assert_same((torch.autograd.grad(fn(state, w)[1][0], w), torch.rand(1)), expected)


def test_what_a_checkpoint_saves_of_the_generator_is_counted() -> None:
    state, fn = sf.compile(sf.init_state(), Net(drop_twice), (torch.randn(8, 6),), backend="eager", rng="torch")
    _, profile = sf.profile(state, fn)
    assert profile.complete
    assert isinstance(profile.saved_bytes, int)
    assert profile.saved_bytes > torch.get_rng_state().nbytes
    assert "run_and_save_rng_state" in profile.to_json()
