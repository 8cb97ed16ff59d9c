"""A compiled function keeps the model as it was: no stale tensors, no changes to the module, no later surprises."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.helpers import assert_same, compiled

X = torch.arange(12.0).view(4, 3)
CAPTURES = pytest.mark.parametrize("capture", ["dynamo", "trace"])


class ListedLayer(nn.Module):
    """Reaches its layer through a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.order = [self.layer]
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.order[0](x)


class StoredMethod(nn.Module):
    """Assigns a buffer in a method that it keeps as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.weight = nn.Parameter(torch.ones(3))
        self.act = self.inner

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x * self.count * self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


@CAPTURES
def test_a_layer_reached_through_a_list_takes_the_parameters_of_the_call(capture: str) -> None:
    state, fn = compiled(ListedLayer(), (X,), capture=capture)
    zeros = {name: torch.zeros_like(value).requires_grad_() for name, value in fn.params.items()}
    out = fn(state, zeros, X)[1]
    assert out.requires_grad
    assert_same(out.detach(), torch.zeros(4, 3))


def test_a_parameter_reached_through_a_closure_is_refused() -> None:
    model = nn.Linear(3, 3).requires_grad_(False)
    inner = model.forward
    model.forward = lambda x: inner(x) * 2  # type: ignore[method-assign]
    state, fn = compiled(model, (X,))
    others = {name: value.detach().clone().requires_grad_() for name, value in fn.params.items()}
    with pytest.raises(
        sf.SpecError, match=r"Expected Linear to reach its tensors through its own modules, got 'weight'"
    ):
        fn(state, others, X)


@CAPTURES
def test_a_stored_method_assigns_the_buffer_of_the_state(capture: str) -> None:
    model = StoredMethod()
    state, fn = compiled(model, (X,), capture=capture)
    for _ in range(2):
        state, out = fn(state, fn.params, X)
    assert_same(state.buffers[fn.owner]["count"], torch.full((3,), 2.0))
    assert_same(out.detach(), X * 2)
    assert_same(model.count, torch.zeros(3))


@CAPTURES
@pytest.mark.parametrize("before", [None, torch.ones(3)], ids=["set", "unset"])
def test_a_buffer_that_comes_or_goes_is_refused(capture: str, before: torch.Tensor | None) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", before)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = x * 2 if before is None else None
            return x + 1

    with pytest.raises(sf.CaptureError, match=r"Expected Changing to keep the buffers .* got 'cache' set"):
        compiled(Changing(), (X,), capture=capture)


def test_a_tensor_that_is_parameter_and_buffer_has_its_whole_gradient() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("again", self.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + self.again

    model = Both()
    state, fn = compiled(model, (X,))
    fn(state, fn.params, X)[1].sum().backward()
    assert_same(model.weight.grad, X.sum(0) + 4)


def test_members_that_print_alike_are_two_variants() -> None:
    class Kind(enum.Enum):
        ONE, TWO = 1, 2

        def __repr__(self) -> str:
            return "Kind"

    state, fn = compiled(lambda x, kind: x * kind.value, (X, Kind.ONE))
    assert_same(fn(state, X, Kind.TWO)[1], X * 2)


def test_changes_of_the_module_do_not_reach_later_variants() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    expected = model(X[:2]).detach()
    state, fn = compiled(model, (X,))
    model[0].register_forward_hook(lambda module, args, out: out * 100)
    model.append(nn.ReLU())
    assert_same(fn(state, fn.params, X[:2])[1].detach(), expected)


def test_grad_mode_that_the_model_asks_for_is_the_calls() -> None:
    state, fn = compiled(lambda x: x * (2 if torch.is_grad_enabled() else 3), (X,))
    with torch.no_grad():
        assert_same(fn(state, X)[1], X * 3)
    assert_same(fn(state, X)[1], X * 2)


def test_a_lazy_module_is_refused_before_it_is_touched() -> None:
    lazy = nn.LazyLinear(5)
    with pytest.raises(sf.SpecError, match=r"got lazy 'weight'. Run the model once"):
        compiled(lazy, (X,))
    assert nn.parameter.is_lazy(lazy.weight)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_outputs_that_depend_on_no_parameter_carry_no_gradient(backend: str) -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                return self.layer(x).argmax(1), self.layer(x)

    model = Choice()
    state, fn = compiled(model, (X,), backend=backend)
    chosen, scores = fn(state, fn.params, X)[1]
    assert not scores.requires_grad
    assert_same(chosen, model(X)[0])


def test_a_call_in_inference_mode_leaves_a_state_that_trains() -> None:
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x * self.weight * self.scale
            self.scale = self.scale * 1.5
            return out

    state, fn = compiled(Moving(), (X,))
    with torch.inference_mode():
        state, _ = fn(state, fn.params, X)
    fn(state, fn.params, X)[1].sum().backward()
    assert_same(fn.params["weight"].grad, X.sum(0) * 1.5)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gradients_can_be_changed_in_place(backend: str) -> None:
    params = {"a": torch.zeros(4, 3), "b": torch.zeros(4, 3)}
    state, fn = compiled(lambda params, x: (x + params["a"] + params["b"]).sum(), (params, X), backend=backend)
    _, (_, grads) = sf.value_and_grad(fn)(state, params, X)
    grads["a"].mul_(0.5)
    assert_same(grads, {"a": torch.full((4, 3), 0.5), "b": torch.ones(4, 3)})


def test_gradients_of_a_tied_parameter_come_under_the_name_that_was_used() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)).sum()

    model = Tied()
    state, fn = compiled(model, (X,))
    step = sf.value_and_grad(fn)
    _, (_, usual) = step(state, fn.params, X)
    _, (_, other) = step(state, {"b.weight": model.a.weight}, X)
    _, (_, both) = step(state, model.state_dict(), X)
    assert_same(other, {"b.weight": usual["a.weight"]})
    assert_same(both, {"a.weight": usual["a.weight"], "b.weight": usual["a.weight"]})


def test_a_value_that_depends_on_nothing_has_zero_gradients() -> None:
    def users_own(state: sf.CompilerState, w: torch.Tensor) -> tuple[sf.CompilerState, torch.Tensor]:
        return state, (X * 2).sum()

    step = sf.value_and_grad(users_own)
    assert_same(step(sf.init_state(), torch.ones(2))[1][1], torch.zeros(2))
    with pytest.raises(sf.SpecError, match=r"Expected argnums below 1, got 3"):
        sf.value_and_grad(users_own, argnums=3)(sf.init_state(), torch.ones(2))


def test_a_changed_buffer_that_shares_memory_is_refused() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.zeros(4)
            self.register_buffer("base", base)
            self.register_buffer("view", base[:2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.base.add_(1)
            return x.sum() * self.view

    with pytest.raises(sf.MutationError, match=r"got 'base', which shares memory with 'view'. Register a clone"):
        compiled(Views(), (X,))
