"""FP8 with delayed scaling inside somebody else's compile: torch.compile as one graph, and a step that sf compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value

import scoped_fn as sf
from tests.fp8.scoped import (
    KINDS,
    NETWORKS,
    Run,
    assert_same_shape_of_state,
    descended,
    example,
    recipe,
    scales,
    trained,
)
from tests.helpers import assert_same

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.resets_dynamo]

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(function: Any, backend: str) -> Any:
    return torch.compile(function, backend=backend, fullgraph=True)


def warm(kind: str = "delayed", name: str = "mlp") -> tuple[Run, list[tuple[Tensor, Tensor]]]:
    run, data = example(kind, name)
    return trained(run, data[:1])[0], data[1:]


def leaves_of(run: Run) -> dict[str, Tensor]:
    return {name: own.clone().requires_grad_() for name, own in run.params.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_gradients(kind: str, backend: str) -> None:
    run, data = warm(kind)
    call = whole(lambda state, params, x, y: run.fn(state, params, x, y), backend)
    for batch in data:
        state, out = call(run.state, run.params, *batch)
        expected_state, expected = run.fn(run.state, run.params, *batch)
        assert_same(out, expected)
        assert sf.tree_equal(state, expected_state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "kind"), NETWORKS)
def test_a_call_and_its_backward(name: str, kind: str, backend: str) -> None:
    run, data = warm(kind, name)
    call = whole(lambda state, params, x, y: run.fn(state, params, x, y), backend)
    results = []
    for function in (run.fn, call):
        leaves = leaves_of(run)
        state, sinks = sf.watch_gradients(run.state)
        state, loss = function(state, leaves, *data[0])
        loss.backward()
        state = sf.update_scales(sf.stage_gradients(state, sinks))
        results.append((loss.detach(), {key: leaf.grad for key, leaf in leaves.items()}, state))
    (loss, grads, state), (outer_loss, outer_grads, outer_state) = results
    assert_same((outer_loss, outer_grads), (loss, grads))
    assert_same_shape_of_state(outer_state, state)
    assert sf.tree_equal(outer_state, state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_calls_in_one_graph_hand_the_state_on(backend: str) -> None:
    run, data = warm()

    def total(state: sf.CompilerState, params: Any) -> Any:
        state, first = run.fn(state, params, *data[0])
        state, second = run.fn(state, params, *data[1])
        return state, first + second

    states = []
    for function in (total, whole(total, backend)):
        state, sinks = sf.watch_gradients(run.state)
        state, loss = function(state, leaves_of(run))
        loss.backward()
        states.append(sf.stage_gradients(state, sinks))
    assert scales(states[1]) == scales(states[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_the_scope_and_the_recipe_are_made_inside(kind: str, backend: str) -> None:
    run, data = warm(kind)

    def call(state: sf.CompilerState, params: Any, x: Tensor, y: Tensor) -> Any:
        made = sf.DelayedScaling(amax_history_len=4) if kind == "delayed" else sf.Float8CurrentScaling()
        state = sf.autocast(state, made)
        state, loss = run.fn(state, params, x, y)
        return sf.end_autocast(state), loss

    outside = sf.end_autocast(run.state)
    state, loss = whole(call, backend)(outside, run.params, *data[0])
    assert state.autocast == ()
    assert_same(loss, run.fn(run.state, run.params, *data[0])[1])
    assert sf.tree_equal(state, outside)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_island_in_high_precision_inside(backend: str) -> None:
    run, data = warm()
    island = sf.autocast(run.state, None, enabled=False)
    _, expected = run.fn(island, run.params, *data[0])

    def call(state: sf.CompilerState, params: Any, x: Tensor, y: Tensor) -> Any:
        return run.fn(sf.autocast(state, None, enabled=False), params, x, y)[1]

    assert_same(whole(call, backend)(run.state, run.params, *data[0]), expected)
    assert not torch.equal(expected, run.fn(run.state, run.params, *data[0])[1])


def test_the_update_of_scales_inside() -> None:
    run, data = warm()
    staged, _ = sf.value_and_grad(run.fn, accumulate=True)(run.state, run.params, *data[0])
    assert scales(whole(sf.update_scales, "aot_eager")(staged)) == scales(sf.update_scales(staged))


def test_a_gradient_by_torch_func_inside() -> None:
    run, data = warm()
    slopes_of = grad_and_value(lambda params, x, y: run.fn(run.state, params, x, y)[1])
    assert_same(whole(slopes_of, "aot_eager")(run.params, *data[0]), slopes_of(run.params, *data[0]))


def train_step(run: Run) -> Any:
    def step(state: sf.CompilerState, params: Any, x: Tensor, y: Tensor) -> Any:
        state, (loss, slopes) = sf.value_and_grad(run.fn)(state, params, x, y)
        return state, (loss, descended(params, slopes))

    return step


def run_as_one_graph(run: Run, data: list[tuple[Tensor, Tensor]], backend: str) -> tuple[Run, Tensor, sf.CompiledFn]:
    """What `trained` does, by a step that is compiled as a whole."""
    args = (run.state, run.params, *data[0])
    state, step = sf.compile(sf.end_autocast(run.state), train_step(run), args, backend=backend)
    inner, params, losses = run.state, run.params, []
    for batch in data:
        state, (inner, (loss, params)) = step(state, inner, params, *batch)
        losses.append(loss)
    return Run(inner, run.fn, params), torch.stack(losses), step


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_training_step_is_one_graph(kind: str) -> None:
    run, data = example(kind)
    after, losses, step = run_as_one_graph(run, data, "eager")
    last, expected = trained(run, data)
    assert_same(losses, torch.stack(expected))
    assert_same(after.params, last.params)
    assert sf.tree_equal(after.state, last.state)
    assert step.cache_info().compiled_graphs == 1
    assert step.cache_info().eager_calls == 0


@pytest.mark.parametrize(("name", "backend"), [("block", "eager"), ("mlp", "inductor")])
def test_a_whole_training_step_within_rounding(name: str, backend: str) -> None:
    run, data = example("delayed", name)  # attention inside another graph has other last bits, without FP8 too
    after, losses, step = run_as_one_graph(run, data, backend)
    torch.testing.assert_close(losses, torch.stack(trained(run, data)[1]), rtol=2e-3, atol=2e-3)
    assert_same_shape_of_state(after.state, run.state)
    assert step.cache_info().compiled_graphs == 1


def test_a_step_whose_recipe_is_made_inside() -> None:
    run, data = example()

    def step(state: sf.CompilerState, params: Any, x: Tensor, y: Tensor) -> Any:
        return sf.with_autocast(state, recipe(), sf.value_and_grad(run.fn), params, x, y)

    outside = sf.end_autocast(run.state)
    state, fn = sf.compile(outside, step, (outside, run.params, *data[0]), backend="eager")
    _, (after, out) = fn(state, outside, run.params, *data[0])
    expected_state, expected = step(outside, run.params, *data[0])
    assert_same(out, expected)
    assert sf.tree_equal(after, expected_state)
