"""Compiled functions under `sf` transforms inside a compile, under transforms of the outer one, and under tracers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, grad_and_value, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import scoped_fn as sf
from tests.compose.carried import energy, normed
from tests.compose.case import Function, numbers, stateless
from tests.compose.modules import mlp
from tests.compose.quiet import QUIET
from tests.compose.trees import stacked, waves
from tests.helpers import assert_same, compiled

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
ARGS = (numbers(3), numbers(3, seed=1))


def close(actual: Any, expected: Any) -> None:
    """Both trees are the same but for rounding."""
    assert_same(actual, expected, **CLOSE)


def test_value_and_grad_inside() -> None:
    inner_state, inner = compiled(energy, ARGS)
    step: Function = lambda state, w, x: sf.value_and_grad(inner, argnums=(0, 1))(state, w, x)[1]  # noqa: E731
    state, fn = sf.compile(inner_state, step, (inner_state, *ARGS), backend="eager")
    slopes, value = grad_and_value(energy, argnums=(0, 1))(*ARGS)
    close(fn(state, inner_state, *ARGS)[1], (value, slopes))
    assert fn.cache_info().compiled_graphs == 1


def test_vmap_and_vmap_of_grad_inside() -> None:
    inner_state, inner = compiled(energy, ARGS)

    def many(state: sf.CompilerState, weight: torch.Tensor, rows: torch.Tensor) -> Any:
        state, values = sf.vmap(inner, in_dims=(None, 0))(state, weight, rows)
        state, slopes = sf.vmap(sf.grad(inner), in_dims=(None, 0), out_dims=1)(state, weight, rows)
        return state, values, slopes

    weight, rows = ARGS[0], stacked(ARGS[1])
    state, fn = sf.compile(inner_state, many, (inner_state, weight, rows), backend="eager")
    _, (_, values, slopes) = fn(state, inner_state, weight, rows)
    close(values, vmap(energy, (None, 0))(weight, rows))
    close(slopes, vmap(grad(energy), (None, 0), 1)(weight, rows))
    assert fn.cache_info().compiled_graphs == 1


def test_jvp_and_vjp_inside() -> None:
    inner_state, inner = compiled(energy, ARGS)

    def both(state: sf.CompilerState, weight: torch.Tensor, x: torch.Tensor) -> Any:
        state, pushed = sf.jvp(inner)(state, (weight, x), (x, weight))
        state, (value, pull) = sf.vjp(inner)(state, weight, x)
        return pushed, pull(value)

    state, fn = sf.compile(inner_state, both, (inner_state, *ARGS), backend="eager")
    value, pull = torch.func.vjp(energy, *ARGS)
    close(fn(state, inner_state, *ARGS)[1], (jvp(energy, ARGS, ARGS[::-1]), pull(value)))


def test_an_ensemble_with_statistics_inside() -> None:
    one, x = normed(), numbers(4, 2)
    params = stacked(one.params)
    states = torch.utils._pytree.tree_map(lambda leaf: torch.stack([leaf] * 3), one.state)
    ensemble = sf.vmap(one.loss, in_dims=(0, None), state_dim=0)
    state, fn = sf.compile(one.state, ensemble, (states, params, x), backend="eager")
    _, (after, values) = fn(state, states, params, x)
    expected, alone = ensemble(states, params, x)
    close(values, alone)
    close(dict(after.buffers[one.fn.owner]), dict(expected.buffers[one.fn.owner]))


@pytest.mark.parametrize("order", ["grad", "vmap of grad", "jvp", "hessian", "autograd", "double backward"])
def test_transforms_over_the_outer_function(order: str) -> None:
    inner_state, inner = compiled(energy, ARGS)
    value = stateless(inner, inner_state)
    outer: Function = lambda w, x: value(w.sin(), x) * value(w, x).sin()  # noqa: E731
    twin: Function = lambda w, x: energy(w.sin(), x) * energy(w, x).sin()  # noqa: E731
    state, fn = sf.compile(inner_state, outer, ARGS, backend="eager")
    close(transformed(order, stateless(fn, state)), transformed(order, twin))
    assert fn.cache_info().eager_calls == 0


def transformed(order: str, function: Function) -> Any:
    """A derivative of the function."""
    if order == "grad":
        return grad(function, argnums=(0, 1))(*ARGS)
    if order == "vmap of grad":
        return vmap(grad(function), (None, 0))(ARGS[0], stacked(ARGS[1]))
    if order == "jvp":
        return jvp(function, ARGS, waves(ARGS))
    if order == "hessian":
        return hessian(function, argnums=(0, 1))(*ARGS)
    leaves = [arg.clone().requires_grad_() for arg in ARGS]
    first = torch.autograd.grad(function(*leaves), leaves, create_graph=order == "double backward")
    return torch.autograd.grad(first[0].square().sum(), leaves) if order == "double backward" else first


def test_a_compile_of_a_compile_of_a_compile() -> None:
    state, fn = compiled(energy, ARGS)
    for _ in range(2):
        value = stateless(fn, state)
        state, fn = sf.compile(state, lambda w, x, value=value: value(w, x).sin(), ARGS, backend="eager")
    twin: Function = lambda w, x: energy(w, x).sin().sin()  # noqa: E731
    close(fn(state, *ARGS)[1], twin(*ARGS))
    close(grad(stateless(fn, state))(*ARGS), grad(twin)(*ARGS))


def test_torch_compile_of_a_function_that_calls_one() -> None:
    model, x = mlp(), numbers(4, 2)
    state, fn = compiled(model, (x,))
    whole = torch.compile(lambda params, x: fn(state, params, x)[1].tanh(), fullgraph=True, backend="aot_eager")
    params = dict(fn.params)
    out, expected = whole(params, x), model(x).tanh()
    close(out.detach(), expected.detach())
    leaves = list(model.parameters())
    close(torch.autograd.grad(out.sum(), list(params.values())), torch.autograd.grad(expected.sum(), leaves))


def test_torch_compile_hands_the_state_through() -> None:
    one, x = normed(), numbers(4, 2)
    whole = torch.compile(lambda state, params, x: one.fn(state, params, x), fullgraph=True, backend="aot_eager")
    after, out = whole(one.state, one.params, x)
    expected, alone = one.fn(one.state, one.params, x)
    close(out, alone)
    close(dict(after.buffers[one.fn.owner]), dict(expected.buffers[one.fn.owner]))


def test_torch_compile_of_a_gradient() -> None:
    state, fn = compiled(energy, ARGS)
    whole = torch.compile(grad(stateless(fn, state)), fullgraph=True, backend="aot_eager")
    close(whole(*ARGS), grad(energy)(*ARGS))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_the_operations(mode: str) -> None:
    state, fn = compiled(energy, ARGS)
    gm = make_fx(stateless(fn, state), tracing_mode=mode)(*ARGS)
    assert mode == "real" or "aten.sin" in gm.code  # with real tensors the compiled code is one operation
    close(gm(*ARGS), energy(*ARGS))
    other = numbers(3, seed=7), numbers(3, seed=8)
    close(gm(*other), energy(*other))


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_of_a_gradient(mode: str) -> None:
    state, fn = compiled(energy, ARGS)
    gm = make_fx(grad(stateless(fn, state)), tracing_mode=mode)(*ARGS)
    assert mode == "real" or "aten.cos" in gm.code
    other = numbers(3, seed=7), numbers(3, seed=8)
    close(gm(*other), grad(energy)(*other))


def test_fake_tensors_give_fake_results() -> None:
    state, fn = compiled(energy, ARGS)
    with FakeTensorMode() as fakes:
        given = tuple(fakes.from_tensor(arg) for arg in ARGS)
        outs = fn(state, *given)[1], grad(stateless(fn, state))(*given)
    assert [tuple(out.shape) for out in outs] == [(), (3,)]
    assert all(type(out).__name__ == "FakeTensor" and out.dtype == torch.float64 for out in outs)
    close(fn(state, *ARGS)[1], energy(*ARGS))


def same_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A pass that changes nothing."""
    return gm


def test_a_function_with_captured_passes_is_refused_inside() -> None:
    inner_state, inner = compiled(energy, ARGS, passes=sf.Passes(captured=same_graph))
    message = "Expected energy to be compiled without captured passes"
    with pytest.raises(sf.CaptureError, match=message):  # Dynamo takes the error apart
        sf.compile(inner_state, lambda w, x: inner(inner_state, w, x)[1], ARGS, backend="eager")
    with pytest.raises(sf.SpecError, match=message):
        make_fx(stateless(inner, inner_state), tracing_mode="fake")(*ARGS)
    close(inner(inner_state, *ARGS)[1], energy(*ARGS))
