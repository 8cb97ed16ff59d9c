"""Calls without gradients, calibration, islands in high precision, and torch's own autocast around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.cases.casekit import assert_fp8_linear
from tests.fp8.networks import batches, loss_of
from tests.fp8.scoped import KINDS, Run, compiled_so_far, example, newest, recipe, rescoped, scales, scoped, trained
from tests.helpers import assert_same, compiled, tensors

pytestmark = pytest.mark.usefixtures("one_thread")

QUIETLY: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "nothing requires a gradient": lambda: torch.enable_grad(),
}


@pytest.mark.parametrize("mode", QUIETLY)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_gradients_leaves_the_state_as_it_was(kind: str, mode: str) -> None:
    run, data = example(kind)
    run, _ = trained(run, data[:2])
    staged, _ = sf.value_and_grad(run.fn, accumulate=True)(run.state, run.params, *data[2])
    for state in (run.state, staged):
        with QUIETLY[mode]():
            after, out = run.fn(state, run.params, 100 * data[3][0], data[3][1])
        assert sf.tree_equal(after, state)
        assert not out.requires_grad


def test_evaluation_uses_the_scales_of_training() -> None:
    run, data = example()
    later, _ = trained(run, data)
    _, early = run.fn(run.state, later.params, *data[0])
    _, late = run.fn(later.state, later.params, *data[0])
    _, (value, _) = sf.value_and_grad(run.fn)(later.state, later.params, *data[0])
    assert_same(late, value)
    assert not torch.equal(early, late)


def test_evaluation_between_steps_changes_no_step() -> None:
    run, data = example()
    _, expected = trained(run, data)
    losses = []
    for batch in data:
        state, _ = run.fn(run.state, run.params, 50 * batch[0], batch[1])
        run, (loss,) = trained(Run(state, run.fn, run.params), [batch])
        losses.append(loss)
    assert_same(losses, expected)


@pytest.mark.parametrize("name", ["mlp", "block"])
def test_calibration_computes_in_high_precision_and_records(name: str) -> None:
    model, data = loss_of(name), batches(name, 3)
    state, exact = compiled(model, data[0])
    run = scoped(model, data[0], calibrating=True)
    assert run.fn.owner in run.state.fp8
    for batch in data:
        after, out = run.fn(run.state, run.params, *batch)
        assert_same(out, exact(state, run.params, *batch)[1])
        assert not sf.tree_equal(after, run.state)
        for roles in newest(after).values():
            assert roles["input"] > 0
            assert roles["weight"] > 0
            assert roles["grad_output"] == 0
        run = Run(sf.update_scales(after), run.fn, run.params)
    with_gradients, (_, grads) = sf.value_and_grad(run.fn, accumulate=True)(run.state, run.params, *data[0])
    assert_same(grads, sf.grad(exact)(state, run.params, *data[0])[1])
    assert all(roles["grad_output"] > 0 for roles in newest(with_gradients).values())


def test_calibration_records_the_amaxes_of_training() -> None:
    model, x = nn.Linear(8, 4), torch.randn(5, 8)
    run = scoped(model, (x,), calibrating=True)
    state, _ = run.fn(run.state, run.params, x)
    (roles,) = newest(state).values()
    assert roles["input"] == x.abs().max()
    assert roles["weight"] == model.weight.abs().max()


def test_scales_of_calibration_serve_training() -> None:
    run, data = example(calibrating=True)
    before = run.state
    run, _ = trained(run, data[:1])
    measured = scales(run.state)
    assert measured != scales(before)
    training = Run(rescoped(run.state, recipe()), run.fn, run.params)
    assert scales(training.state) == measured
    fresh = scoped(run.fn.captured.source.call, data[1])
    _, (loss, _) = sf.value_and_grad(run.fn)(training.state, run.params, *data[1])
    _, (unscaled, _) = sf.value_and_grad(fresh.fn)(fresh.state, run.params, *data[1])
    assert not torch.equal(loss, unscaled)


@pytest.mark.parametrize("of", [None, "delayed"])
def test_a_scope_that_is_not_enabled_is_high_precision(of: str | None) -> None:
    run, data = example()
    state, exact = compiled(run.fn.captured.source.call, data[0])
    island = sf.autocast(run.state, None if of is None else recipe(of), enabled=False)
    after, (loss, grads) = sf.value_and_grad(run.fn)(island, run.params, *data[0])
    assert_same((loss, grads), sf.value_and_grad(exact)(state, run.params, *data[0])[1])
    assert scales(after) == scales(run.state)
    assert_same(trained(Run(sf.end_autocast(after), run.fn, run.params), data)[1], trained(run, data)[1])


def test_each_scope_compiles_once() -> None:
    run, data = example()
    ways = [recipe(), recipe("current"), recipe("mx"), None]
    states = [rescoped(run.state, way, enabled=way is not None) for way in ways]
    losses = [sf.value_and_grad(run.fn)(state, run.params, *data[0])[1][0].item() for state in states]
    assert len(set(losses)) == 4
    before = compiled_so_far(run.fn)
    again = [rescoped(run.state, way, enabled=way is not None) for way in ways]
    assert [sf.value_and_grad(run.fn)(state, run.params, *data[0])[1][0].item() for state in again] == losses
    assert compiled_so_far(run.fn) == before


def test_a_function_compiled_without_a_scope_follows_one_later() -> None:
    model, data = loss_of("mlp"), batches("mlp", 2)
    state, fn = compiled(model, data[0])
    expected = scoped(model, data[0], "current")
    _, (loss, grads) = sf.value_and_grad(fn)(sf.autocast(state, recipe("current")), expected.params, *data[0])
    assert_same((loss, grads), sf.value_and_grad(expected.fn)(expected.state, expected.params, *data[0])[1])


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_torchs_autocast_around(kind: str) -> None:
    model, x, dy = nn.Linear(34, 5, bias=False), torch.randn(6, 34), torch.randn(6, 5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        run = scoped(model, (x.requires_grad_(),), kind)
        state, params = run.state, {name: own.requires_grad_() for name, own in run.params.items()}
        for _ in range(2):
            x.grad = params["weight"].grad = None
            state, sinks = sf.watch_gradients(state)
            state, y = run.fn(state, params, x)
            y.backward(dy)
            state = sf.update_scales(sf.stage_gradients(state, sinks))
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == params["weight"].grad.dtype == torch.float32
    rounded, weight = x.detach().bfloat16(), model.weight.detach().bfloat16()
    results = y, x.grad, params["weight"].grad
    assert_fp8_linear(rounded, weight, None, dy, *results, None, out_rel=2.0**-7)


def test_scopes_nest_and_an_inner_one_replaces_the_outer_one() -> None:
    run, data = example(skip=("0",))
    assert run.fn.sites == ("net.2",)
    inner = sf.autocast(run.state, recipe("current"))
    assert [scope.skip for scope in inner.autocast] == [("0",), ()]
    expected, _ = example("current")
    _, (loss, _) = sf.value_and_grad(run.fn)(inner, run.params, *data[0])
    assert_same(loss, sf.value_and_grad(expected.fn)(expected.state, run.params, *data[0])[1][0])
    assert sf.tree_equal(sf.end_autocast(inner), run.state)


def test_with_autocast_opens_and_closes() -> None:
    run, data = example()
    outside = sf.end_autocast(run.state)
    step = sf.value_and_grad(run.fn)
    state, (loss, _) = sf.with_autocast(outside, recipe(), step, run.params, *data[0])
    assert state.autocast == outside.autocast == ()
    assert_same(loss, step(run.state, run.params, *data[0])[1][0])
    assert scales(state) == scales(step(run.state, run.params, *data[0])[0])
    state, (loss, _) = sf.with_autocast(run.state, None, step, run.params, *data[0], enabled=False)
    assert state.autocast == run.state.autocast
    assert not any(tensor.requires_grad for tensor in tensors(state))
