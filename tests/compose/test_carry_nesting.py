"""The carry-first transforms over each other, and with `torch.func` around and between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap

import scoped_fn as sf
from tests.compose.carried import SUBJECTS, StatefulFn, Subject
from tests.compose.case import Function
from tests.compose.quiet import QUIET
from tests.compose.trees import inner, stacked, waves
from tests.helpers import assert_same, tensors

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
EVERY = pytest.mark.parametrize("name", SUBJECTS)


def squares(slopes: Any) -> torch.Tensor:
    """The squared length of a tree."""
    return inner(slopes, slopes)


def penalty(function: StatefulFn) -> StatefulFn:
    """The squared length of a stateful function's gradient."""

    def run(state: sf.CompilerState, *args: Any) -> tuple[sf.CompilerState, torch.Tensor]:
        state, slopes = sf.grad(function)(state, *args)
        return state, squares(slopes)

    return run


def mean_over_rows(function: StatefulFn) -> StatefulFn:
    """The mean over rows of the last argument, by `sf.vmap`."""

    def run(state: sf.CompilerState, first: Any, rows: Any) -> tuple[sf.CompilerState, torch.Tensor]:
        state, values = sf.vmap(function, in_dims=(None, 0))(state, first, rows)
        return state, values.mean()

    return run


def split(one: Subject) -> tuple[Any, Any, Any]:
    """The shared argument, one row, and many rows."""
    return *one.args, stacked(one.args[1])


def over_two(function: Function, first: Any, rows: Any) -> Any:
    return vmap(function, in_dims=(None, 0))(first, rows)


Nest = Callable[[Subject], tuple[Any, Any]]


def vmap_of_grad(one: Subject) -> tuple[Any, Any]:
    first, _, rows = split(one)
    _, out = sf.vmap(sf.grad(one.function), in_dims=(None, 0), chunk_size=2)(one.state, first, rows)
    return out, over_two(grad(one.twin), first, rows)


def vmap_of_value_and_grad(one: Subject) -> tuple[Any, Any]:
    first, _, rows = split(one)
    _, out = sf.vmap(sf.value_and_grad(one.function, argnums=(0, 1)), in_dims=(None, 0))(one.state, first, rows)
    slopes, values = over_two(grad_and_value(one.twin, argnums=(0, 1)), first, rows)
    return out, (values, slopes)


def grad_of_grad(one: Subject) -> tuple[Any, Any]:
    _, out = sf.grad(penalty(one.function), argnums=(0, 1))(one.state, *one.args)
    return out, grad(lambda *args: squares(grad(one.twin)(*args)), argnums=(0, 1))(*one.args)


def third_order(one: Subject) -> tuple[Any, Any]:
    _, out = sf.value_and_grad(penalty(penalty(one.function)))(one.state, *one.args)
    once: Function = lambda *args: squares(grad(one.twin)(*args))  # noqa: E731
    slopes, value = grad_and_value(lambda *args: squares(grad(once)(*args)))(*one.args)
    return out, (value, slopes)


def jvp_of_grad(one: Subject) -> tuple[Any, Any]:
    tangents = waves(one.args)
    _, out = sf.jvp(sf.grad(one.function))(one.state, one.args, tangents)
    return out, jvp(grad(one.twin), one.args, tangents)


def grad_of_jvp(one: Subject) -> tuple[Any, Any]:
    tangents = waves(one.args)

    def along(state: sf.CompilerState, *args: Any) -> tuple[sf.CompilerState, torch.Tensor]:
        state, (_, tangent) = sf.jvp(one.function)(state, args, tangents)
        return state, tangent

    _, out = sf.grad(along, argnums=(0, 1))(one.state, *one.args)
    return out, grad(lambda *args: jvp(one.twin, args, tangents)[1], argnums=(0, 1))(*one.args)


def vmap_of_jvp(one: Subject) -> tuple[Any, Any]:
    tangents = stacked(waves(one.args))
    push = sf.vmap(sf.jvp(one.function), in_dims=(None, 0))
    _, out = push(one.state, one.args, tangents)
    return out, vmap(lambda *tangents: jvp(one.twin, one.args, tangents))(*tangents)


def vmap_of_vjp(one: Subject) -> tuple[Any, Any]:
    first, _, rows = split(one)

    def pulled(state: sf.CompilerState, *args: Any) -> tuple[sf.CompilerState, Any]:
        state, (value, pull) = sf.vjp(one.function)(state, *args)
        return state, (value, pull(2 * torch.ones_like(value)))

    _, out = sf.vmap(pulled, in_dims=(None, 0))(one.state, first, rows)
    slopes, values = over_two(grad_and_value(lambda *args: 2 * one.twin(*args), argnums=(0, 1)), first, rows)
    return out, (values / 2, slopes)


def value_and_grad_of_vmap(one: Subject) -> tuple[Any, Any]:
    first, _, rows = split(one)
    _, out = sf.value_and_grad(mean_over_rows(one.function))(one.state, first, rows)
    slopes, value = grad_and_value(lambda first, rows: over_two(one.twin, first, rows).mean())(first, rows)
    return out, (value, slopes)


def vmap_of_penalty(one: Subject) -> tuple[Any, Any]:
    first, _, rows = split(one)
    _, out = sf.vmap(sf.grad(penalty(one.function)), in_dims=(None, 0))(one.state, first, rows)
    return out, over_two(grad(lambda *args: squares(grad(one.twin)(*args))), first, rows)


def vmap_of_vmap_of_grad(one: Subject) -> tuple[Any, Any]:
    first, _, rows = split(one)
    many = stacked(rows)
    twice = sf.vmap(sf.vmap(sf.grad(one.function), in_dims=(None, 0)), in_dims=(None, 1), out_dims=1)
    _, out = twice(one.state, first, many)
    return out, vmap(vmap(grad(one.twin), (None, 0)), (None, 1), 1)(first, many)


NESTS: list[Nest] = [
    vmap_of_grad, vmap_of_value_and_grad, grad_of_grad, third_order, jvp_of_grad, grad_of_jvp, vmap_of_jvp, vmap_of_vjp,
    value_and_grad_of_vmap, vmap_of_penalty, vmap_of_vmap_of_grad,
]  # fmt: skip


@EVERY
@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: nest.__name__)
def test_they_compose_with_each_other(name: str, nest: Nest) -> None:
    one = SUBJECTS[name]()
    assert_same(*nest(one), **CLOSE)
    assert one.fn is None or one.fn.cache_info().eager_calls == 0


OUTSIDE: dict[str, Callable[[Function, Any], Any]] = {
    "vmap": lambda slope, args: vmap(slope)(*stacked(args)),
    "jvp": lambda slope, args: jvp(slope, args, waves(args)),
    "vjp": lambda slope, args: vjp(slope, *args)[1](waves(args[0])),
    "jacrev": lambda slope, args: jacrev(slope, argnums=1)(*args),
    "grad": lambda slope, args: grad(lambda *own: squares(slope(*own)), argnums=(0, 1))(*args),
    "hessian": lambda slope, args: hessian(lambda last: squares(slope(args[0], last)))(args[1]),
}


@EVERY
@pytest.mark.parametrize("outside", OUTSIDE)
def test_torch_func_over_sf_grad(name: str, outside: str) -> None:
    one = SUBJECTS[name]()
    actual = OUTSIDE[outside](lambda *args: sf.grad(one.function)(one.state, *args)[1], one.args)
    assert_same(actual, OUTSIDE[outside](grad(one.twin), one.args), **CLOSE)
    assert not any(tensor.requires_grad for tensor in tensors(actual))


@EVERY
def test_torch_func_between_sf_transforms(name: str) -> None:
    one = SUBJECTS[name]()

    def bend(state: sf.CompilerState, first: Any, last: torch.Tensor) -> tuple[sf.CompilerState, torch.Tensor]:
        slope = jacrev(lambda own: sf.grad(one.function, argnums=1)(state, first, own)[1])
        return state, slope(last).square().sum()

    _, actual = sf.grad(bend, argnums=1)(one.state, *one.args)
    twin: Function = lambda last: hessian(one.twin, argnums=1)(one.args[0], last).square().sum()  # noqa: E731
    assert_same(actual, grad(twin)(one.args[1]), **CLOSE)
