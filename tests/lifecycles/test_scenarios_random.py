"""Random operations: one mask for forward, backward and recompute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scoped_fn as sf
from tests.helpers import assert_same, fresh
from tests.lifecycles.graphs import backward_of, calls, saved_bytes

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Expected .*:UserWarning"),  # random numbers stay, so a budget may not be met
]
BUDGETS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHAPE = (16, 8)


class Noisy(nn.Module):
    """Dropout and noise between layers that are cheap to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x).tanh(), 0.5)
        x = (self.second(x) + 0.1 * torch.randn(*SHAPE)).sigmoid().exp()
        x = F.dropout(self.third(x * x).sin(), 0.25)
        return (x * torch.rand_like(x)).square().sum()


def noisy() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return Noisy(), torch.randn(SHAPE)


def by_autograd(state: sf.CompilerState, fn: sf.CompiledFn, x: Tensor) -> Any:
    params = fresh(fn.params)
    torch.manual_seed(7)
    _, loss = fn(state, params, x)
    torch.rand(5)
    loss.backward()
    return loss.detach(), {name: own.grad for name, own in params.items()}


def by_value_and_grad(state: sf.CompilerState, fn: sf.CompiledFn, x: Tensor) -> Any:
    torch.manual_seed(7)
    return sf.value_and_grad(fn)(state, fresh(fn.params), x)[1]


def by_engine(model: nn.Module, x: Tensor, passes: Any) -> Any:
    engine = sf.Engine(copy.deepcopy(model), (x,), backend="eager", rng="torch", passes=passes)
    torch.manual_seed(7)
    loss = engine(x)
    torch.rand(5)
    loss.backward()
    return loss.detach(), {name: own.grad for name, own in engine.model.named_parameters()}


def compiled(passes: Any, backend: str = "eager") -> tuple[sf.CompilerState, sf.CompiledFn, Tensor]:
    model, x = noisy()
    return *sf.compile(sf.init_state(), model, (x,), backend=backend, rng="torch", passes=passes), x


@pytest.fixture(scope="module")
def without() -> Any:
    """What plain autograd and `value_and_grad` give without a budget, and eager."""
    model, x = noisy()
    torch.manual_seed(7)
    loss = model(x)
    loss.backward()
    eager = loss.detach(), {name: own.grad for name, own in model.named_parameters()}
    plain = compiled(sf.Passes())
    return by_autograd(*plain), by_value_and_grad(*plain), eager


# 14
@pytest.mark.parametrize("budget", BUDGETS)
def test_dropout_and_noise_at_each_budget_have_the_gradients_of_no_budget(budget: float, without: Any) -> None:
    state, fn, x = compiled([sf.passes.memory_budget(budget)])
    assert_same(by_autograd(state, fn, x), without[0])
    assert_same(by_value_and_grad(state, fn, x), without[1])
    assert_same(by_value_and_grad(state, fn, x), without[2], rtol=1e-5, atol=1e-6)


# 14
@pytest.mark.parametrize("budget", BUDGETS)
def test_an_engine_with_dropout_at_each_budget_has_the_gradients_of_no_budget(budget: float, without: Any) -> None:
    assert_same(by_engine(*noisy(), sf.passes.memory_budget(budget)), without[0])


# 14
def test_what_is_recomputed_is_no_random_operation() -> None:
    plain, small = (compiled(passes)[1] for passes in (sf.Passes(), sf.passes.memory_budget(0.0)))
    assert saved_bytes(small) < saved_bytes(plain)
    assert [str(node.target) for node in backward_of(small).graph.nodes if is_random(node)] == []
    assert len([node for node in small.forward_graph.gm.graph.nodes if is_random(node)]) == 4
    again = [calls(backward_of(fn), torch.ops.aten.tanh.default) for fn in (plain, small)]
    assert again[1] > again[0], "but the rest is"


def is_random(node: torch.fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


# 14
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_mask_of_the_backward_is_that_of_the_forward(budget: float) -> None:
    x = torch.rand(64, 8) + 1
    state, fn = sf.compile(
        sf.init_state(),
        lambda x: F.dropout(x.square(), 0.5) + x * torch.randn(64, 8),
        (x.requires_grad_(),),
        backend="eager",
        rng="torch",
        passes=sf.passes.memory_budget(budget),
    )
    torch.manual_seed(7)
    _, out = fn(state, x)
    out.sum().backward()
    torch.manual_seed(7)
    kept = F.dropout(torch.ones(64, 8), 0.5)
    noise = torch.randn(64, 8)
    with torch.no_grad():
        assert 0 < (kept == 0).sum() < 64 * 8
        assert_same(out.detach(), x.square() * kept + x * noise, rtol=1e-6, atol=1e-6)
        assert_same(x.grad, 2 * x * kept + noise, rtol=1e-6, atol=1e-6)


# 14
def test_under_inductor_a_budget_leaves_the_mask_as_it_is(without: Any) -> None:
    state, fn, x = compiled([sf.passes.memory_budget(0.25)], "inductor")
    assert_same(by_autograd(state, fn, x), without[2], rtol=1e-4, atol=1e-5)
