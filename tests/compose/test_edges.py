"""Corners: leaks out of a transform, plain calls inside one, in-place changes, threads, autocast, layouts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.func import grad, grad_and_value, hessian, jvp, vjp, vmap

import scoped_fn as sf
from tests.compose.carried import energy, normed
from tests.compose.case import Function, numbers, stateless
from tests.compose.modules import mlp
from tests.compose.quiet import QUIET
from tests.compose.trees import stacked, waves
from tests.helpers import assert_same, compiled

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def close(actual: Any, expected: Any) -> None:
    """Both trees are the same but for rounding."""
    assert_same(actual, expected, **CLOSE)


LEAKING: dict[str, Callable[[Function, Any], Any]] = {
    "grad": lambda f, args: grad(f)(*args),
    "jvp": lambda f, args: jvp(f, args, waves(args)),
    "hessian": lambda f, args: hessian(f, argnums=1)(*args),
    "vmap": lambda f, args: vmap(lambda scale: f(*args) * scale)(torch.arange(3.0, dtype=torch.float64)),
    "vmap of grad": lambda f, args: vmap(lambda scale: grad(lambda *own: f(*own) * scale)(*args))(numbers(3)),
}


@pytest.mark.parametrize("way", LEAKING)
def test_a_state_that_leaks_out_of_a_transform_works_afterwards(way: str) -> None:
    one, x = normed(), numbers(4, 2)
    state = one.state

    def value(params: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal state
        state, out = one.loss(state, params, x)
        return out

    LEAKING[way](value, (one.params, x))
    leaked, (expected, _) = state, one.twin(one.params, x)
    after, out = one.loss(leaked, one.params, x)
    close(out, expected)
    assert after.buffers[one.fn.owner]["1.num_batches_tracked"] >= 2
    close(sf.grad(one.loss)(leaked, one.params, x)[1], grad(one.twin, has_aux=True)(one.params, x)[0])
    rows = vmap(lambda x: one.loss(leaked, one.params, x)[1])(stacked(x))
    close(rows, torch.stack([one.twin(one.params, row)[0] for row in stacked(x)]))


def test_a_tensor_that_leaks_out_of_a_transform_can_be_an_argument() -> None:
    state, fn = compiled(energy, (numbers(3), numbers(3, seed=1)))
    kept: list[torch.Tensor] = []

    def value(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        kept.append(fn(state, weight, x)[1] * weight)
        return fn(state, kept[-1], x)[1]

    slope = grad(value)(numbers(3), numbers(3, seed=1))
    close(slope, grad(lambda w, x: energy(energy(w, x) * w, x))(numbers(3), numbers(3, seed=1)))
    close(fn(state, kept[0], numbers(3, seed=1))[1], value(numbers(3), numbers(3, seed=1)))


def test_a_call_in_a_transform_with_plain_arguments_is_a_plain_call() -> None:
    args = numbers(3), numbers(3, seed=1)
    state, fn = compiled(energy, args)
    expected, compiled_graphs = fn(state, *args)[1], fn.cache_info().compiled_graphs

    def constant(x: torch.Tensor) -> torch.Tensor:
        out = fn(state, *args)[1]
        assert not torch._C._functorch.is_functorch_wrapped_tensor(out)
        close(out, expected)
        return (x * out).sum()

    x = numbers(2, 3, seed=4)
    close(vmap(constant)(x), x.sum(1) * expected)
    close(grad(constant)(x[0]), expected.expand(3))
    close(jvp(constant, (x[0],), (x[1],)), (x[0].sum() * expected, x[1].sum() * expected))
    close(vmap(grad(constant))(x), expected.expand(2, 3))
    assert fn.cache_info().compiled_graphs == compiled_graphs


def test_plain_autograd_goes_on_inside_a_transform_with_plain_arguments() -> None:
    state, fn = compiled(energy, (numbers(3), numbers(3, seed=1)))
    weight, x = numbers(3).requires_grad_(), numbers(3, seed=1)
    out = vmap(lambda scale: fn(state, weight, x)[1] * scale)(numbers(2, seed=3))
    (slope,) = torch.autograd.grad(out.sum(), weight)
    close(slope, grad(energy)(weight.detach(), x) * numbers(2, seed=3).sum())


FUNCTIONS: dict[str, Function] = {
    "saves its argument": lambda x, y: (x * y).sin(),
    "saves its result": lambda x, y: x.exp() + y,
    "saves nothing": lambda x, y: x * 2 + y,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("changed", [0, 1])
def test_a_change_in_place_before_the_backward_ends_as_in_eager(name: str, changed: int) -> None:
    function = FUNCTIONS[name]
    state, fn = compiled(function, (numbers(3).requires_grad_(), numbers(3, seed=1)))
    ends = []
    for call in (function, stateless(fn, state)):
        args = [numbers(3).requires_grad_(), numbers(3, seed=1)]
        out = call(*args)
        with torch.no_grad():
            args[changed].add_(1)
        try:
            out.sum().backward()
        except RuntimeError:
            ends.append(None)
        else:
            ends.append(args[0].grad)
    eager, actual = ends
    if eager is not None and actual is None:  # stricter than eager is not wrong, but only where something is saved
        assert name != "saves nothing"
    elif actual is not None:
        assert eager is not None, "eager refuses"
        close(actual, eager)


def test_two_backwards_after_retain_graph() -> None:
    ends = []
    model = mlp()
    state, fn = compiled(model, (numbers(2, 2),))
    for call in (lambda x: model(x), lambda x: fn(state, fn.params, x)[1]):
        x = numbers(2, 2).requires_grad_()
        out = call(x).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        out.backward(retain_graph=True)
        first = x.grad.clone()
        slope.square().sum().backward(retain_graph=True)
        out.backward()
        ends.append((first, slope.detach(), x.grad, [p.grad.clone() for p in model.parameters()]))
        model.zero_grad()
        with pytest.raises(RuntimeError, match="second time|freed"):
            out.backward()
    close(ends[1], ends[0])
    assert fn.cache_info().eager_calls == 0


def test_threads_that_take_derivatives_at_once_give_the_same_bits() -> None:
    args = numbers(3), numbers(3, seed=1)
    state, fn = compiled(energy, args)
    call = stateless(fn, state)

    def work(index: int) -> Any:
        weight = args[0] * (1 + index % 2)
        per_sample = vmap(grad_and_value(call), in_dims=(None, 0))(weight, stacked(args[1]))
        bend = grad(lambda w: grad(call)(w, args[1]).square().sum())(weight)  # torch's forward mode is for one thread
        return grad(call, argnums=(0, 1))(weight, args[1]), per_sample, bend

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(32)))
    for index, one in enumerate(found):
        assert_same(one, found[index % 2])
        close(one, work(index))
    close(found[0][0], grad(energy, argnums=(0, 1))(*args))
    assert fn.cache_info().eager_calls == 0


def test_autocast_around_per_sample_gradients() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)), torch.randn(5, 3)
    state, fn = compiled(model, (x[0],))
    params = {name: one.detach().clone() for name, one in fn.params.items()}
    eager: Function = lambda params, x: torch.func.functional_call(model, params, (x,))  # noqa: E731
    ours: Function = lambda params, x: fn(state, params, x)[1]  # noqa: E731
    found = []
    for function in (ours, eager):
        with torch.autocast("cpu", torch.bfloat16):
            total: Function = lambda params, x, function=function: (function(params, x) ** 2).sum()  # noqa: E731
            found.append((vmap(grad(total), (None, 0))(params, x), vmap(function, (None, 0))(params, x)))
    assert_same(found[0], found[1], rtol=5e-2, atol=5e-2)
    exact = vmap(eager, (None, 0))(params, x)
    assert not torch.equal(found[0][1].float(), exact), "autocast did nothing"
    assert_same(vmap(ours, (None, 0))(params, x), exact, rtol=1e-5, atol=1e-6)  # it is off again


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: numbers(3).expand(4, 3),
    "expanded inside": lambda: numbers(4, 1).expand(4, 3),
    "transposed": lambda: numbers(3, 4).T,
    "every second": lambda: numbers(8, 6)[::2, ::2],
    "with an offset": lambda: numbers(6, 3)[2:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_other_layouts_under_vmap(layout: str) -> None:
    weight, rows = numbers(3, seed=3), LAYOUTS[layout]()
    state, fn = compiled(energy, (weight, weight))
    call = stateless(fn, state)
    for _ in range(2):
        close(vmap(call, (None, 0))(weight, rows), vmap(energy, (None, 0))(weight, rows))
        close(vmap(grad(call, (0, 1)), (None, 0))(weight, rows), vmap(grad(energy, (0, 1)), (None, 0))(weight, rows))
        close(vmap(call, (None, 1))(weight, rows.T), vmap(energy, (None, 0))(weight, rows))
    pull = vjp(vmap(call, (None, 0)), weight, rows)[1]
    close(pull(torch.ones(1, dtype=torch.float64).expand(4)),
          vjp(vmap(energy, (None, 0)), weight, rows)[1](torch.ones(4, dtype=torch.float64)))  # fmt: skip
    assert fn.cache_info().eager_calls == 0
