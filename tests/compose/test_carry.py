"""`sf.grad`, `sf.value_and_grad`, `sf.vmap`, `sf.jvp` and `sf.vjp` are those of `torch.func`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as torch_pytree

import scoped_fn as sf
from tests.compose.carried import SUBJECTS, StatefulFn, Subject, compiled_function, energy
from tests.compose.case import Function, numbers
from tests.compose.quiet import QUIET
from tests.compose.trees import mapped, stacked, waves
from tests.helpers import assert_same, compiled, tensors

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
EVERY = pytest.mark.parametrize("name", SUBJECTS)
FIRST = [0, 1, (0,), (0, 1), (1, 0)]


def close(actual: Any, expected: Any) -> None:
    """Both trees are the same but for rounding."""
    assert_same(actual, expected, **CLOSE)


def same_structure(after: sf.CompilerState, before: sf.CompilerState) -> None:
    """The static part of both states is the same, by optree's and by torch's account."""
    assert sf.state.tree_structure(after) == sf.state.tree_structure(before)
    assert torch_pytree.tree_structure(after) == torch_pytree.tree_structure(before)


def with_aux(function: StatefulFn) -> StatefulFn:
    """The stateful function that returns its value and something else too."""

    def pair(state: sf.CompilerState, *args: Any) -> tuple[sf.CompilerState, Any]:
        state, value = function(state, *args)
        return state, (value, {"last": args[-1] * 2, "note": "kept"})

    return pair


def twin_with_aux(twin: Function) -> Function:
    """The twin with the tensors of the same aux; torch.func takes only tensors there."""
    return lambda *args: (twin(*args), {"last": args[-1] * 2})


@EVERY
@pytest.mark.parametrize("argnums", FIRST, ids=str)
def test_grad_and_value_and_grad(name: str, argnums: Any) -> None:
    one = SUBJECTS[name]()
    slopes, value = torch.func.grad_and_value(one.twin, argnums=argnums)(*one.args)
    state, actual = sf.grad(one.function, argnums=argnums)(one.state, *one.args)
    close(actual, slopes)
    again, both = sf.value_and_grad(one.function, argnums=argnums)(state, *one.args)
    close(both, (value, slopes))
    for after in (state, again):
        same_structure(after, one.state)
    assert one.fn is None or one.fn.cache_info().eager_calls == 0


@EVERY
def test_grad_and_value_and_grad_with_aux(name: str) -> None:
    one = SUBJECTS[name]()
    slopes, (value, aux) = torch.func.grad_and_value(twin_with_aux(one.twin), has_aux=True)(*one.args)
    expected_aux = {**aux, "note": "kept"}
    state, (actual, found) = sf.grad(with_aux(one.function), has_aux=True)(one.state, *one.args)
    close((actual, found), (slopes, expected_aux))
    state, ((same, found), actual) = sf.value_and_grad(with_aux(one.function), has_aux=True)(state, *one.args)
    close((same, found, actual), (value, expected_aux, slopes))
    same_structure(state, one.state)


def test_aux_of_a_compiled_function() -> None:
    def pair(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (x**3).sum(), {"square": x**2}

    state, fn = compiled(pair, (numbers(3),))
    x = numbers(3, seed=2)
    close(sf.grad(fn, has_aux=True)(state, x)[1], (3 * x**2, {"square": x**2}))
    close(sf.value_and_grad(fn, has_aux=True)(state, x)[1], (pair(x), 3 * x**2))
    _, (value, tangent, aux) = sf.jvp(fn, has_aux=True)(state, (x,), (x,))
    close((value, tangent, aux), ((x**3).sum(), (3 * x**3).sum(), {"square": x**2}))
    _, (value, pull, aux) = sf.vjp(fn, has_aux=True)(state, x)
    close((value, pull(torch.ones_like(value)), aux), ((x**3).sum(), (3 * x**2,), {"square": x**2}))


@EVERY
def test_jvp_and_vjp(name: str) -> None:
    one = SUBJECTS[name]()
    tangents = waves(one.args)
    state, pushed = sf.jvp(one.function)(one.state, one.args, tangents)
    close(pushed, torch.func.jvp(one.twin, one.args, tangents))
    state, (value, pull) = sf.vjp(one.function)(state, *one.args)
    expected, twin_pull = torch.func.vjp(one.twin, *one.args)
    close((value, pull(waves(value))), (expected, twin_pull(waves(expected))))
    same_structure(state, one.state)
    assert one.fn is None or one.fn.cache_info().eager_calls == 0


@EVERY
def test_jvp_and_vjp_with_aux(name: str) -> None:
    one = SUBJECTS[name]()
    pair = lambda state, *args: (state, (one.function(state, *args)[1], {"last": args[-1] * 2}))  # noqa: E731
    _, pushed = sf.jvp(pair, has_aux=True)(one.state, one.args, waves(one.args))
    close(pushed, torch.func.jvp(twin_with_aux(one.twin), one.args, waves(one.args), has_aux=True))
    _, (value, pull, aux) = sf.vjp(pair, has_aux=True)(one.state, *one.args)
    expected, twin_pull, twin_aux = torch.func.vjp(twin_with_aux(one.twin), *one.args, has_aux=True)
    close((value, pull(waves(value)), aux), (expected, twin_pull(waves(expected)), twin_aux))


VMAPS: dict[str, dict[str, Any]] = {
    "every argument": {},
    "the last argument": {"in_dims": (None, 0)},
    "the first argument": {"in_dims": (0, None)},
    "in chunks": {"chunk_size": 2},
    "with randomness": {"randomness": "different"},
}


@EVERY
@pytest.mark.parametrize("options", VMAPS.values(), ids=VMAPS)
def test_vmap(name: str, options: dict[str, Any]) -> None:
    one = SUBJECTS[name]()
    dims = options.get("in_dims", (0, 0))
    args = tuple(stacked(arg) if dim == 0 else arg for arg, dim in zip(one.args, dims, strict=True))
    state, out = sf.vmap(one.function, **options)(one.state, *args)
    close(out, torch.func.vmap(one.twin, dims)(*args))
    same_structure(state, one.state)
    assert one.fn is None or one.fn.cache_info().eager_calls == 0


def test_vmap_over_other_dimensions() -> None:
    state, fn = compiled(lambda x, y: {"sum": x + y, "product": x * y.sin()}, (numbers(2), numbers(2)))
    twin: Function = lambda x, y: {"sum": x + y, "product": x * y.sin()}  # noqa: E731
    args = numbers(2, 4), numbers(4, 2, seed=1)
    for out_dims in (0, 1, -1):
        _, out = sf.vmap(fn, (1, 0), out_dims)(state, *args)
        close(out, torch.func.vmap(twin, (1, 0), out_dims)(*args))
    _, out = sf.vmap(fn, in_dims=(-1, None), out_dims={"sum": 1, "product": 0})(state, args[0], args[1][0])
    close(out, {"sum": args[0] + args[1][0][:, None], "product": (args[0] * args[1][0].sin()[:, None]).T})


def test_nested_vmap_and_trees_of_dimensions() -> None:
    state, fn = compiled(lambda tree: tree["a"] * tree["b"].sum(), ({"a": numbers(3), "b": numbers(3, seed=1)},))
    tree = {"a": numbers(3, 4), "b": numbers(5, 3, seed=1)}
    inner = sf.vmap(fn, in_dims=({"a": 1, "b": None},))
    state, out = sf.vmap(inner, in_dims=({"a": None, "b": 0},), out_dims=1)(state, tree)
    close(out, tree["b"].sum(1)[None, :, None] * tree["a"].T[:, None, :])


def test_keyword_arguments_are_passed_on() -> None:
    state, fn = compiled(lambda x, *, power: (x**power).sum(), (numbers(3),), {"power": 3})
    x = numbers(3, seed=1)
    close(sf.grad(fn)(state, x, power=3)[1], 3 * x**2)
    close(sf.vmap(fn)(state, x[:, None].expand(3, 3), power=3)[1], x**3 * 3)
    close(sf.vmap(sf.grad(fn))(state, x[None], power=3)[1], 3 * x[None] ** 2)


ON_TOP: dict[str, Callable[[Subject], Any]] = {
    "grad": lambda one: sf.grad(one.function)(one.state, *one.args),
    "value_and_grad": lambda one: sf.value_and_grad(one.function)(one.state, *one.args),
    "grad of all": lambda one: sf.grad(one.function, argnums=(0, 1))(one.state, *one.args),
}


@EVERY
@pytest.mark.parametrize("what", ON_TOP)
def test_gradients_on_top_hang_on_nothing(name: str, what: str) -> None:
    one = SUBJECTS[name]()
    leaves = mapped(lambda leaf: leaf.clone().requires_grad_(), one.args)
    found = ON_TOP[what](Subject(one.state, one.function, one.twin, leaves, one.fn))
    assert not any(tensor.requires_grad for tensor in tensors(found))
    assert all(leaf.grad is None for leaf in tensors(leaves))
    close(found[1], ON_TOP[what](one)[1])


def test_gradients_on_top_do_not_need_grad_mode() -> None:
    one = compiled_function()
    own: StatefulFn = lambda state, *args: one.function(state, *args)  # noqa: E731
    expected = torch.func.grad(energy)(*one.args)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close(sf.grad(one.function)(one.state, *one.args)[1], expected)
            close(sf.grad(own)(one.state, *one.args)[1], expected)
