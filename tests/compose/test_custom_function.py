"""Custom autograd.Functions keep their own backward, at every order and under every transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, vmap

from tests.compose.case import Case, Function, compiled_call, eager_call, numbers, stateless
from tests.compose.custom import (
    ContextSurrogate,
    Outer,
    SavedOutput,
    StraightThrough,
    Surrogate,
    TwoOutputs,
    WithIndex,
)
from tests.compose.quiet import QUIET
from tests.compose.transforms import transform_named
from tests.helpers import assert_same, compiled

pytestmark = QUIET


def straight_through(x: torch.Tensor) -> torch.Tensor:
    return StraightThrough.apply(x * 2) * x


def surrogate(x: torch.Tensor) -> torch.Tensor:
    return Surrogate.apply(x.sin()) * x


def old_style(x: torch.Tensor) -> torch.Tensor:
    return ContextSurrogate.apply(x.sin()) * x


def saved_output(x: torch.Tensor) -> torch.Tensor:
    return SavedOutput.apply(x, x.sin()) + x


def two_outputs(x: torch.Tensor) -> torch.Tensor:
    sine, cosine = TwoOutputs.apply(x * 2)
    return sine * cosine + x


def one_of_two_outputs(x: torch.Tensor) -> torch.Tensor:
    return TwoOutputs.apply(x)[1] * x


def with_index(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, order = WithIndex.apply(x * 2)
    return values * x, order


def nested(x: torch.Tensor) -> torch.Tensor:
    return Outer.apply(x) * x


def twice(x: torch.Tensor) -> torch.Tensor:
    return Surrogate.apply(Surrogate.apply(x) + StraightThrough.apply(x).sin())


FUNCTIONS: dict[str, Function] = {
    one.__name__: one
    for one in (straight_through, surrogate, saved_output, two_outputs, one_of_two_outputs, nested, twice)
}
ORDERS = ["call", "grad", "vjp", "autograd.grad", "jacrev", "vmap", "per-sample gradients", "grad of vmap",
          "double backward", "gradient penalty", "grad of grad", "jacrev of jacrev", "hvp reverse over reverse",
          "autograd of grad", "grad of vmap of grad", "vmap of vmap of grad", "grad of grad of grad",
          "triple backward"]  # fmt: skip
PLAIN = ["call", "autograd.grad", "backward", "double backward", "gradient penalty", "triple backward"]
NO_VMAP_RULE = ["vmap", "per-sample gradients", "ensemble gradients", "grad of vmap"]


def case_of(function: Function) -> Case:
    """A case of the function at three numbers."""
    return Case(function.__name__, lambda: function, lambda: (numbers(3),))


def check(case: Case, name: str) -> None:
    """The transform of the compiled case equals eager's, and nothing ran eager."""
    args, transform = case.inputs(), transform_named(name)
    expected = transform.apply(eager_call(case), args)
    call, fn = compiled_call(case)
    assert_same(transform.apply(call, args), expected, rtol=1e-9, atol=1e-11, what=name)
    assert fn.cache_info().eager_calls == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_its_own_backward_at_every_order(name: str, order: str) -> None:
    check(case_of(FUNCTIONS[name]), order)


@pytest.mark.parametrize("order", PLAIN)
def test_the_older_style_by_autograd(order: str) -> None:
    check(case_of(old_style), order)


@pytest.mark.parametrize("order", [name for name in ORDERS if name not in PLAIN])
def test_the_older_style_under_torch_func_is_refused_or_right(order: str) -> None:
    args, transform = (numbers(3),), transform_named(order)
    with pytest.raises(RuntimeError, match="setup_context"):
        transform.apply(old_style, args)
    call, fn = compiled_call(case_of(old_style))
    try:
        actual = transform.apply(call, args)
    except (RuntimeError, TypeError) as error:
        assert str(error)
    else:  # the same function in the style that torch.func takes
        assert_same(actual, transform.apply(surrogate, args), rtol=1e-9, atol=1e-11)
        assert fn.cache_info().eager_calls == 0


@pytest.mark.parametrize(
    "order", ["call", "grad", "vjp", "jacrev", *PLAIN[1:4], "grad of grad", "hvp reverse over reverse"]
)
def test_a_result_without_gradient(order: str) -> None:
    check(case_of(with_index), order)


@pytest.mark.parametrize("order", NO_VMAP_RULE)
def test_a_function_without_a_vmap_rule_is_refused_or_right(order: str) -> None:
    args, transform = (numbers(3),), transform_named(order)
    with pytest.raises(RuntimeError, match="does not have vmap support"):
        transform.apply(with_index, args)
    call, fn = compiled_call(case_of(with_index))
    try:
        transform.apply(call, args)
    except (RuntimeError, TypeError) as error:
        assert str(error)
    else:
        assert fn.cache_info().eager_calls == 0


SIDES = pytest.mark.parametrize("side", ["eager", "compiled"])


def rounded(side: str) -> tuple[Function, torch.Tensor]:
    """Rounding times the argument, where it is known what every derivative is."""
    function, x = (lambda x: StraightThrough.apply(x) * x), torch.tensor([0.4, 1.6], dtype=torch.float64)
    if side == "compiled":
        state, fn = compiled(function, (x,))
        function = stateless(fn, state)
    return function, x


@SIDES
def test_derivatives_of_a_straight_through_rule_by_hand(side: str) -> None:
    function, x = rounded(side)
    total = lambda own: function(own).sum()  # noqa: E731
    first, second = x.round() + 3 * x, torch.full((2,), 6.0, dtype=torch.float64)
    assert_same(grad(total)(x), first)
    assert_same(jacrev(jacrev(total))(x), second.diag())
    assert_same(grad(lambda own: grad(total)(own).sum())(x), second)
    assert_same(vmap(grad(total))(torch.stack([x, x])), torch.stack([first, first]))
    assert_same(vmap(grad(lambda own: grad(total)(own).sum()))(x[None]), second[None])


@SIDES
def test_a_backward_may_be_nonlinear_by_hand(side: str) -> None:
    x = torch.tensor([0.3, -0.8], dtype=torch.float64)
    function: Any = lambda own: Surrogate.apply(own)  # noqa: E731
    if side == "compiled":
        state, fn = compiled(function, (x,))
        function = stateless(fn, state)
    slope = grad(lambda own: function(own).sum())
    assert_same(slope(x), 1 - x.tanh() ** 2, rtol=1e-12, atol=1e-12)
    bend = -2 * x.tanh() * (1 - x.tanh() ** 2)
    assert_same(grad(lambda own: slope(own).sum())(x), bend, rtol=1e-12, atol=1e-12)
    assert_same(vmap(grad(lambda own: slope(own).sum()))(x[None]), bend[None], rtol=1e-12, atol=1e-12)
