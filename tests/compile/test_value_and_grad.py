"""`value_and_grad`: one compiled graph for a value and its gradients, of the structure of the argument."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.compile.models import Loss
from tests.compile.models import batch as make_batch
from tests.helpers import assert_disjoint, assert_same, compiled, fresh, unchanged

BACKENDS = pytest.mark.parametrize("backend", ["eager", "inductor"])


@BACKENDS
def test_value_and_grad_equals_eager(backend: str) -> None:
    model, batch = Loss(), make_batch()
    state, fn = compiled(model, batch, backend=backend)
    params = fresh(fn.params)
    with unchanged(params, batch, model.state_dict()):
        after, (value, grads) = sf.value_and_grad(fn)(state, params, *batch)
    expected = model(*batch)
    expected.backward()
    assert after is state
    assert type(grads) is dict
    assert_same(value, expected.detach(), rtol=1e-5, atol=1e-6)
    assert_same(grads, {name: one.grad for name, one in model.named_parameters()}, rtol=1e-5, atol=1e-6)
    assert not value.requires_grad
    assert all(one.grad is None for one in params.values())
    assert_disjoint(value, grads, params, batch)


def test_value_and_grad_is_one_compiled_graph() -> None:
    batch = make_batch()
    state, fn = compiled(Loss(), batch)
    step = sf.value_and_grad(fn)
    state, _ = step(state, fn.params, *batch)
    graphs, calls = fn.cache_info().compiled_graphs, fn.cache_info().compiled_calls
    for _ in range(3):
        state, _ = step(state, fn.params, *batch)
    assert fn.cache_info().compiled_graphs == graphs
    assert fn.cache_info().compiled_calls == calls + 3
    assert fn.cache_info().eager_calls == 0


def test_value_and_grad_trains_a_model() -> None:
    torch.manual_seed(0)
    batch = make_batch()
    state, fn = compiled(Loss(), batch)
    step, params, values = sf.value_and_grad(fn), dict(fn.params), []
    for _ in range(40):
        state, (value, grads) = step(state, params, *batch)
        params = {name: (one - 0.1 * grads[name]).detach() for name, one in params.items()}
        values.append(value.item())
    assert values[-1] < 0.8 * values[0]


def test_value_and_grad_works_under_no_grad() -> None:
    batch = make_batch()
    state, fn = compiled(Loss(), batch)
    _, expected = sf.value_and_grad(fn)(state, fn.params, *batch)
    with torch.no_grad():
        _, ours = sf.value_and_grad(fn)(state, fn.params, *batch)
    assert_same(ours, expected)


def test_value_and_grad_of_a_function_takes_its_first_argument() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    state, fn = compiled(lambda x, y: (x * x * y).sum(), (x, y))
    assert_same(sf.value_and_grad(fn)(state, x, y)[1], (torch.tensor(19.0), 2 * x * y))
    assert_same(sf.value_and_grad(fn, argnums=1)(state, x, y)[1], (torch.tensor(19.0), x * x))


def test_value_and_grad_gives_the_structure_of_the_argument() -> None:
    tree = {"a": [torch.ones(2), torch.ones(3)], "b": torch.tensor(2.0)}
    state, fn = compiled(lambda tree: tree["a"][0].sum() * tree["b"], (tree,))
    _, (_, grads) = sf.value_and_grad(fn)(state, tree)
    assert_same(grads, {"a": [torch.full((2,), 2.0), torch.zeros(3)], "b": torch.tensor(2.0)})


@BACKENDS
def test_value_and_grad_carries_what_else_comes_out(backend: str) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return x.square().sum(), {"double": x * 2, "note": "kept"}

    x = torch.tensor([1.0, 2.0])
    state, fn = compiled(function, (x,), backend=backend)
    _, ((value, extra), grads) = sf.value_and_grad(fn, has_aux=True)(state, x)
    assert_same(value, torch.tensor(5.0))
    assert_same(extra, {"double": x * 2, "note": "kept"})
    assert_same(grads, 2 * x)


def test_value_and_grad_threads_buffers() -> None:
    class Normed(Loss):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    model, batch = Normed(), make_batch()
    twin = copy.deepcopy(model)
    state, fn = compiled(model, batch)
    for _ in range(2):
        state, (value, grads) = sf.value_and_grad(fn)(state, fn.params, *batch)
        twin.zero_grad()
        expected = twin(*batch)
        expected.backward()
        assert_same(value, expected.detach(), rtol=1e-5, atol=1e-6)
        assert_same(grads, {name: one.grad for name, one in twin.named_parameters()}, rtol=1e-5, atol=1e-6)
    assert_same(dict(state.buffers[fn.owner]), dict(twin.named_buffers()), rtol=1e-5, atol=1e-6)


def test_value_and_grad_of_a_users_own_stateful_function() -> None:
    batch = make_batch()
    model = Loss()
    state, fn = compiled(model, batch)

    def penalised(state: sf.CompilerState, params: Any, *batch: torch.Tensor) -> Any:
        state, loss = fn(state, params, *batch)
        return state, loss + sum(one.square().sum() for one in params.values())

    _, (value, grads) = sf.value_and_grad(penalised)(state, fn.params, *batch)
    expected = model(*batch) + sum(one.square().sum() for one in model.parameters())
    expected.backward()
    assert_same(value, expected.detach(), rtol=1e-5, atol=1e-6)
    assert_same(grads, {name: one.grad for name, one in model.named_parameters()}, rtol=1e-5, atol=1e-6)
