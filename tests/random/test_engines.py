"""Engines, ensembles and functions inside others draw from the state's key too."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scoped_fn as sf
from tests.helpers import assert_same, process_unchanged
from tests.random.models import X, by_autograd, compiled, noisy, params_of
from tests.random.oracle import assert_bits, drawn, keys_of

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def engine(seed: int = 5, **options: Any) -> sf.Engine:
    return sf.Engine(noisy(), (X,), backend="eager", state=sf.init_state(key=seed), **options)


def step(one: sf.Engine) -> Any:
    """The loss and the gradients of one step, which are thrown away after."""
    one.zero_grad()
    loss = one(X)
    loss.backward()
    return loss.detach(), [own.grad.clone() for own in one.model.parameters() if own.grad is not None]


def test_an_engine_draws_what_the_function_draws() -> None:
    one = engine()
    state, fn = compiled(noisy(), X)
    for _ in range(3):
        assert_bits(one.state.key, state.key)
        loss, grads = step(one)
        state, expected, by_name = by_autograd(state, fn)
        assert_same(loss, expected, **CLOSE)
        assert_same(grads, list(by_name.values()), **CLOSE)
    assert_bits(one.state.key, state.key)


def test_an_engines_step_again_from_its_state() -> None:
    one = engine()
    saved = one.state
    first = step(one)
    second = step(one)
    assert not torch.equal(first[0], second[0])
    one.state = saved
    assert_same(step(one), first)
    one.state = replace(saved, key=sf.random.key(6))
    other = step(one)
    assert not torch.equal(other[0], first[0])
    assert_same(other, step(engine(6)))


def test_an_engine_in_evaluation_draws_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    one, twin = (sf.Engine(copy.deepcopy(model), (X,), backend="eager") for _ in range(2))
    for each in (one, twin):
        each(X).sum().backward()
    key = one.state.key
    one.eval()
    with torch.no_grad():
        assert_same(one(X), model[0](X))
    assert_bits(one.state.key, key)
    one.train()
    assert_same(one(X), twin(X))


def test_engines_neither_read_nor_move_torchs_generators() -> None:
    results = []
    for seed in (1, 2):
        one = engine()
        torch.manual_seed(seed)
        with process_unchanged():
            results.append([step(one), step(one)])
    assert_same(results[0], results[1])


def test_two_engines_in_any_order() -> None:
    alone = [step(engine(5)), step(engine(6))]
    one, other = engine(5), engine(6)
    second = step(other)
    assert_same([step(one), second], alone)


def test_an_engine_of_torchs_generators_keeps_its_key() -> None:
    one = engine(rng="torch")
    step(one)
    assert_bits(one.state.key, sf.init_state(key=5).key)


def test_a_schedule_and_a_recompile_leave_the_numbers_as_they_are() -> None:
    plain, other = engine(), engine()
    expected = [step(plain) for _ in range(3)]
    found = [step(other)]
    other.recompile()
    found.append(step(other))
    other.recompile(sf.passes.memory_budget(0.5))
    found.append(step(other))
    assert_same(found, expected, **CLOSE)


def test_a_function_inside_another_draws_in_its_turn() -> None:
    """Inlined, the inner function draws from the state that it is given, as it does alone."""
    x = torch.ones(50)
    state, inner = compiled(lambda x: F.dropout(x, 0.5) + torch.rand(50), x)

    def outer(state: sf.CompilerState, x: Tensor) -> Any:
        state, first = inner(state, x)
        state, second = inner(state, x * 2)
        return state, (first, second)

    outer_state, fn = sf.compile(state, outer, (state, x), backend="eager")
    after_outer, (after, (first, second)) = fn(outer_state, state, x)
    middle, expected_first = inner(state, x)
    last, expected_second = inner(middle, x * 2)
    assert_same((first, second), (expected_first, expected_second))
    assert_bits(after.key, last.key)
    assert_bits(after_outer.key, outer_state.key)
    assert fn.cache_info().compiled_graphs == 1


def test_a_function_inside_one_that_draws_itself() -> None:
    x = torch.ones(50)
    state, inner = compiled(lambda x: torch.rand(50) * x, x)
    outer = lambda state, x: (torch.rand(50), inner(state, x)[1], torch.rand(50))  # noqa: E731
    outer_state, fn = sf.compile(replace(state, key=sf.random.key(9)), outer, (state, x), backend="eager")
    after, (first, middle, last) = fn(outer_state, state, x)
    key, *keys = keys_of(outer_state.key, 3)
    assert_bits(first, drawn("uniform", keys[0], (50,)))
    assert_bits(last, drawn("uniform", keys[1], (50,)))
    assert_same(middle, inner(state, x)[1])
    assert_bits(after.key, key)


@pytest.mark.parametrize("fullgraph", [True])
def test_a_function_inside_torch_compile(fullgraph: bool) -> None:
    x = torch.ones(50)
    state, inner = compiled(lambda x: F.dropout(x, 0.5) + torch.rand(50), x)
    outer = torch.compile(lambda state, x: inner(state, x * 3), backend="eager", fullgraph=fullgraph)
    after, out = outer(state, x)
    expected_after, expected = inner(state, x * 3)
    assert_same(out, expected)
    assert_bits(after.key, expected_after.key)


def test_a_whole_step_compiled_once_more() -> None:
    state, fn = compiled(noisy(), X)
    params = params_of(fn, grad=False)
    step = sf.value_and_grad(fn)

    def two(state: sf.CompilerState, params: dict[str, Tensor], x: Tensor) -> Any:
        state, (one, grads) = step(state, params, x)
        params = {name: own - 0.1 * grads[name] for name, own in params.items()}
        state, (other, grads) = step(state, params, x)
        return state, one, other, grads

    expected = two(state, params, X)
    outer_state, outer = sf.compile(state, two, (state, params, X), backend="eager")
    _, found = outer(outer_state, state, params, X)
    assert_bits(found[0].key, expected[0].key)
    assert_same(found[1:], expected[1:], **CLOSE)


def test_members_of_an_ensemble_have_streams_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).double()
    state, fn = compiled(copy.deepcopy(model), X)
    states = [replace(state, key=sf.random.key(seed)) for seed in (1, 2, 3)]
    stacked = sf.state.tree_map(lambda *leaves: torch.stack(leaves), *states)
    params = params_of(fn, grad=False)
    after, out = sf.vmap(fn, (None, None), state_dim=0, randomness="different")(stacked, params, X)
    alone = [fn(one, params, X) for one in states]
    assert_same(out, torch.stack([one for _, one in alone]), **CLOSE)
    expected = sf.state.tree_map(lambda *leaves: torch.stack(leaves), *[one for one, _ in alone])
    assert_bits(after.key, expected.key)
