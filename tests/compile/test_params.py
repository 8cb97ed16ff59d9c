"""Parameters are an argument: which names they have, what may be passed, and where gradients go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.compile.models import Spare, Tied, TwoPaths
from tests.helpers import assert_same, assert_trains_like_eager, compiled, fresh, process_unchanged, unchanged


def test_params_are_the_modules_own_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    _, fn = compiled(model, (torch.randn(2, 3),))
    assert type(fn.params) is dict
    assert list(fn.params) == [name for name, _ in model.named_parameters()]
    assert all(fn.params[name] is parameter for name, parameter in model.named_parameters())


def test_other_parameters_give_other_results() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    state, fn = compiled(model, (x,))
    zeros = {name: torch.zeros_like(parameter) for name, parameter in fn.params.items()}
    assert_same(fn(state, zeros, x)[1], torch.zeros(4, 2))
    assert_same(fn(state, fn.params, x)[1], model(x))


def test_an_optimizer_step_in_place_is_seen() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    state, fn = compiled(model, (x,))
    optimizer = torch.optim.SGD(fn.params.values(), lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        state, out = fn(state, fn.params, x)
        loss = out.square().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        assert_same(fn(state, fn.params, x)[1], model(x))
    assert len(set(losses)) == 3


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_tied_weights_train_like_eager(backend: str) -> None:
    model = Tied()
    _, fn = assert_trains_like_eager(model, (torch.tensor([0, 3, 3]),), backend=backend)
    assert set(fn.params) == {"embedding.weight", "head.bias"}
    assert fn.aliases == {"head.weight": "embedding.weight"}


def test_one_submodule_under_two_names_trains_like_eager() -> None:
    _, fn = assert_trains_like_eager(TwoPaths(), (torch.randn(2, 3),))
    assert set(fn.params) == {"first.weight", "first.bias"}
    assert fn.aliases == {"again.weight": "first.weight", "again.bias": "first.bias"}


def test_tied_gradients_are_counted_once() -> None:
    model, x = TwoPaths(), torch.randn(2, 3)
    state, fn = compiled(model, (x,))
    _, (_, grads) = sf.value_and_grad(lambda s, p, x: _summed(fn, s, p, x))(state, fn.params, x)
    model(x).sum().backward()
    assert_same(grads, {name: parameter.grad for name, parameter in model.named_parameters()}, rtol=1e-6, atol=1e-6)


def _summed(fn: Any, state: Any, params: Any, x: torch.Tensor) -> Any:
    state, out = fn(state, params, x)
    return state, out.sum()


def test_either_name_of_a_tied_weight_is_accepted() -> None:
    model, tokens = Tied(), torch.tensor([1, 2])
    state, fn = compiled(model, (tokens,))
    expected = fn(state, fn.params, tokens)[1]
    renamed = {"head.weight": fn.params["embedding.weight"], "head.bias": fn.params["head.bias"]}
    assert_same(fn(state, renamed, tokens)[1], expected)
    both = {**renamed, "embedding.weight": fn.params["embedding.weight"]}
    assert_same(fn(state, both, tokens)[1], expected)


def test_two_values_for_one_tied_weight_are_refused() -> None:
    model, tokens = Tied(), torch.tensor([1, 2])
    state, fn = compiled(model, (tokens,))
    contradiction = {**fn.params, "head.weight": torch.zeros(5, 3)}
    with pytest.raises(sf.SpecError, match=r"Expected .*, got .*"):
        fn(state, contradiction, tokens)


def test_an_unused_parameter_gets_none_under_autograd() -> None:
    model, x = Spare(), torch.randn(4, 3)
    state, fn = compiled(model, (x,))
    assert set(fn.params) == {"used.weight", "used.bias", "spare"}
    fn(state, fn.params, x)[1].sum().backward()
    assert model.spare.grad is None
    assert model.used.weight.grad is not None


def test_an_unused_parameter_gets_zeros_in_value_and_grad() -> None:
    class Loss(Spare):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

    model, x = Loss(), torch.randn(4, 3)
    state, fn = compiled(model, (x,))
    _, (_, grads) = sf.value_and_grad(fn)(state, fn.params, x)
    assert_same(grads["spare"], torch.zeros(4))


def test_frozen_parameters_get_no_gradient() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(4, 3)
    model[0].requires_grad_(False)
    _, fn = assert_trains_like_eager(model, (x,))
    state, fn = compiled(model, (x,))
    with unchanged(fn.params):
        fn(state, fn.params, x)[1].sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None
    assert "0.weight" in fn.params


def test_freezing_after_compile_is_a_variant() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(4, 3)
    state, fn = compiled(model, (x,))
    params = fresh(fn.params)
    params["0.weight"].requires_grad_(False)
    fn(state, params, x)[1].sum().backward()
    assert params["0.weight"].grad is None
    assert params["1.weight"].grad is not None


def test_thawing_after_compile_is_a_variant() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(4, 3)
    model[0].requires_grad_(False)
    state, fn = compiled(model, (x,))
    params = {name: one.detach().clone().requires_grad_() for name, one in fn.params.items()}
    fn(state, params, x)[1].sum().backward()
    model.requires_grad_(True)
    model(x).sum().backward()
    assert_same({name: one.grad for name, one in params.items()},
                {name: one.grad for name, one in model.named_parameters()}, rtol=1e-6, atol=1e-6)  # fmt: skip


def test_gradients_accumulate_as_in_eager() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    state, fn = compiled(model, (x,))
    for _ in range(3):
        fn(state, fn.params, x)[1].sum().backward()
    assert_same(model.bias.grad, torch.full((2,), 12.0))


def test_a_module_without_parameters() -> None:
    x = torch.randn(3).requires_grad_()
    state, fn = compiled(nn.GELU(), (x,))
    assert fn.params == {}
    fn(state, {}, x)[1].sum().backward()
    ours, x.grad = x.grad, None
    nn.GELU()(x).sum().backward()
    assert_same(ours, x.grad)


def test_a_plain_function_has_no_params_and_no_mode() -> None:
    _, fn = compiled(torch.sin, (torch.ones(2),))
    assert fn.params == {}
    assert fn.training is None


def test_a_function_closed_over_trainable_parameters_is_refused() -> None:
    linear, x = nn.Linear(3, 2), torch.randn(4, 3)
    with pytest.raises(sf.CaptureError, match=r"Expected .*argument.*, got .*closure"):
        compiled(lambda x: linear(x).tanh(), (x,))
    linear.requires_grad_(False)
    state, fn = compiled(lambda x: linear(x).tanh(), (x,))
    assert_same(fn(state, x)[1], linear(x).tanh(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_read_at_compile_time_and_kept(training: bool) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train(training), torch.randn(4, 3)
    state, fn = compiled(model, (x,))
    assert fn.training is training
    expected = fn(state, fn.params, x)[1]
    model.train(not training)
    assert fn.training is training
    assert_same(fn(state, fn.params, x)[1], expected)
    other = torch.randn(6, 3)
    _, frozen = fn(state, fn.params, other)
    assert model.training is not training
    model.train(training)
    assert_same(frozen, model(other), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_a_lazy_module_is_refused_and_stays_lazy(capture: str) -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.ReLU())
    with process_unchanged(), pytest.raises((sf.SpecError, sf.CaptureError), match=r"Expected .*, got lazy '0.weight'"):
        compiled(model, (torch.ones(4, 3),), capture=capture)
    assert nn.parameter.is_lazy(model[0].weight)
