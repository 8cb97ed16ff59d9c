"""A compiled function inside what is compiled or traced again: one graph, the right values, buffers handed through."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import scoped_fn as sf
from tests.compose.carried import energy, normed
from tests.compose.case import Function, numbers, stateless
from tests.compose.modules import batch_norm, mlp
from tests.compose.quiet import QUIET
from tests.compose.trees import stacked, waves
from tests.helpers import assert_same, compiled, tensors

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def close(actual: Any, expected: Any) -> None:
    """Both trees are the same but for rounding."""
    assert_same(actual, expected, **CLOSE)


def detached_params(fn: sf.CompiledFn) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in fn.params.items()}


def test_a_compiled_function_inside_is_part_of_one_graph() -> None:
    args = numbers(3), numbers(3, seed=1)
    inner_state, inner = compiled(energy, args)

    def outer(state: sf.CompilerState, weight: torch.Tensor, x: torch.Tensor) -> Any:
        state, first = inner(state, weight.sin(), x)
        state, second = inner(state, weight, x * 2)
        return state, first * second

    state, fn = sf.compile(inner_state, outer, (inner_state, *args), backend="eager")
    before = inner.cache_info()
    state, (inner_state, out) = fn(state, inner_state, *args)
    close(out, energy(args[0].sin(), args[1]) * energy(args[0], args[1] * 2))
    assert fn.cache_info().compiled_graphs == 1
    assert "mul" in str(fn.forward_graph)
    assert inner.cache_info() == before


def test_a_compiled_function_in_a_closure_needs_no_state_as_argument() -> None:
    inner_state, inner = compiled(torch.sin, (numbers(3),))
    state, fn = sf.compile(inner_state, lambda x: inner(inner_state, x)[1] * x, (numbers(3),), backend="eager")
    close(fn(state, numbers(3, seed=2))[1], numbers(3, seed=2).sin() * numbers(3, seed=2))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_compiled_module_inside(training: bool) -> None:
    model, x = mlp(), numbers(4, 2)
    inner_state, inner = compiled(model, (x,))
    params = inner.params if training else detached_params(inner)
    outer: Function = lambda state, params, x: inner(state, params, x)[1].square().sum()  # noqa: E731
    state, fn = sf.compile(inner_state, outer, (inner_state, params, x), backend="eager")
    _, out = fn(state, inner_state, params, x)
    expected = model(x).square().sum()
    assert fn.cache_info().compiled_graphs == (2 if training else 1)
    if training:
        leaves = list(model.parameters())
        close(torch.autograd.grad(out, list(params.values())), torch.autograd.grad(expected, leaves))
    close(out.detach(), expected.detach())


def test_buffers_go_through_the_inner_state() -> None:
    model, x = batch_norm(), numbers(4, 2)
    inner_state, inner = compiled(model, (x,))
    params, twin = detached_params(inner), copy.deepcopy(model)

    def outer(state: sf.CompilerState, params: Any, x: torch.Tensor) -> Any:
        state, first = inner(state, params, x)
        state, second = inner(state, params, first)
        return state, second

    state, fn = sf.compile(inner_state, outer, (inner_state, params, x), backend="eager")
    for step in range(3):
        x = numbers(4, 2, seed=step)
        state, (inner_state, out) = fn(state, inner_state, params, x)
        close(out, twin(twin(x)).detach())
    assert isinstance(inner_state, sf.CompilerState)
    close(dict(sorted(inner_state.buffers[inner.owner].items())), dict(sorted(twin.named_buffers())))
    assert not model[1].num_batches_tracked
    assert fn.cache_info().compiled_graphs == 1


def test_the_inner_state_that_comes_back_serves_the_inner_function() -> None:
    one, x = normed(), numbers(4, 2)
    args = (one.state, one.params, x)
    state, fn = sf.compile(one.state, lambda *args: one.fn(*args), args, backend="eager")
    _, (after, out) = fn(state, *args)
    expected, alone = one.fn(*args)
    close(out, alone)
    close(one.fn(after, *args[1:])[1], one.fn(expected, *args[1:])[1])
    assert sf.state.tree_structure(after) == sf.state.tree_structure(expected)


DERIVED: dict[str, tuple[Callable[[Function], Function], bool]] = {
    "grad": (grad, True),
    "grad of all": (lambda f: grad(f, argnums=(0, 1)), True),
    "vmap of grad": (lambda f: vmap(grad(f), in_dims=(None, 0)), True),
    "jacrev": (lambda f: jacrev(lambda *args: torch.stack([f(*args), f(*args).sin()])), True),
    "jacfwd": (lambda f: jacfwd(lambda *args: torch.stack([f(*args), f(*args).sin()])), False),
    "hessian": (hessian, False),
    "grad of grad": (lambda f: grad(lambda *args: grad(f)(*args).square().sum()), True),
    "jvp": (lambda f: lambda *args: jvp(f, args, waves(args)), False),
}


def derived_args(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = numbers(3, seed=1)
    return numbers(3), stacked(x) if name.startswith("vmap") else x


@pytest.mark.parametrize("inside", ["plain", "compiled"])
@pytest.mark.parametrize("name", DERIVED)
def test_a_derived_function_compiles(name: str, inside: str) -> None:
    derive, differentiable = DERIVED[name]
    args, value = derived_args(name), energy
    inner_state = sf.init_state()
    if inside == "compiled":
        inner_state, inner = compiled(energy, (numbers(3), numbers(3, seed=1)))
        value = stateless(inner, inner_state)
    state, fn = sf.compile(inner_state, derive(value), args, backend="eager")
    close(fn(state, *args)[1], derive(energy)(*args))
    assert fn.cache_info().compiled_graphs == 1
    assert fn.cache_info().eager_calls == 0
    if differentiable:
        total: Function = lambda f: lambda *args: sum((t * t).sum() for t in tensors(f(*args)))  # noqa: E731
        close(grad(total(stateless(fn, state)))(*args), grad(total(derive(energy)))(*args))


def adam(params: Any, slopes: Any, first: Any, second: Any) -> tuple[Any, Any, Any]:
    """One step of Adam without bias correction, and its moments."""
    first = {name: 0.9 * first[name] + 0.1 * slope for name, slope in slopes.items()}
    second = {name: 0.99 * second[name] + 0.01 * slope * slope for name, slope in slopes.items()}
    moved = {name: own - 0.05 * first[name] / (second[name].sqrt() + 1e-3) for name, own in params.items()}
    return moved, first, second


class Loss(nn.Module):
    """A network with batch norm, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = batch_norm()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.net(x) - y) ** 2).mean()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_whole_training_step_with_its_optimiser_is_one_graph(backend: str) -> None:
    model, x, y = Loss(), numbers(4, 2), numbers(4, 2, seed=1)
    inner, fn = compiled(model, (x, y))
    params, twin, buffers = detached_params(fn), detached_params(fn), dict(inner.buffers[fn.owner])
    zeros = {name: torch.zeros_like(own) for name, own in params.items()}

    def step(state: sf.CompilerState, params: Any, moments: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        state, (value, slopes) = sf.value_and_grad(fn)(state, params, x, y)
        params, *moments = adam(params, slopes, *moments)
        return state, value, params, moments

    moments, twin_moments = [zeros, zeros], [zeros, zeros]
    state, step_fn = sf.compile(inner, step, (inner, params, moments, x, y), backend=backend)
    for _ in range(3):
        state, (inner, value, params, moments) = step_fn(state, inner, params, moments, x, y)

        def loss(p: Any, before: Any = buffers) -> Any:
            own = {name: one.clone() for name, one in before.items()}
            return functional_call(model, {**p, **own}, (x, y)), own

        slopes, (expected, buffers) = torch.func.grad_and_value(loss, has_aux=True)(twin)
        twin, *twin_moments = adam(twin, slopes, *twin_moments)
        close((value, params, moments), (expected, twin, twin_moments))
    close(dict(sorted(inner.buffers[fn.owner].items())), dict(sorted(buffers.items())))
    assert step_fn.cache_info().compiled_graphs == 1
