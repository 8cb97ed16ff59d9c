"""Derivatives of functions that draw: with one key a function is a function, and finite differences say its slope."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests.compose.quiet import QUIET
from tests.helpers import assert_same
from tests.random.models import X, compiled, smooth

pytestmark = QUIET
STEP = 1e-5
x, u, w = X[0], X[1].cos(), X[2].sin()


@pytest.fixture(scope="module")
def value() -> Any:
    """The compiled function at one state, as a function of a tensor [4]."""
    state, fn = compiled(smooth, x)
    return lambda x: fn(state, x)[1]


def slope(function: Any, x: Tensor, direction: Tensor) -> Any:
    """A central difference along a direction."""
    return (function(x + STEP * direction) - function(x - STEP * direction)) / (2 * STEP)


def close(actual: Any, expected: Any) -> None:
    assert_same(actual, expected, rtol=1e-6, atol=1e-7)


def test_the_first_derivative(value: Any) -> None:
    expected = slope(value, x, u)
    assert expected.abs() > 0.1
    close((grad(value)(x) * u).sum(), expected)
    close(jvp(value, (x,), (u,))[1], expected)
    leaf = x.clone().requires_grad_()
    close((torch.autograd.grad(value(leaf), leaf)[0] * u).sum(), expected)


SECOND = {
    "reverse of reverse": lambda f: grad(lambda x: (grad(f)(x) * u).sum()),
    "forward of reverse": lambda f: lambda x: jvp(grad(f), (x,), (u,))[1],
    "reverse of forward": lambda f: grad(lambda x: jvp(f, (x,), (u,))[1]),
    "jacfwd of grad": lambda f: lambda x: jacfwd(grad(f), randomness="same")(x) @ u,
    "jacrev of grad": lambda f: lambda x: jacrev(grad(f))(x) @ u,
    "jacrev of jacrev": lambda f: lambda x: jacrev(jacrev(f))(x) @ u,
    "jacfwd of jacrev": lambda f: lambda x: jacfwd(jacrev(f), randomness="same")(x) @ u,
    "vjp of grad": lambda f: lambda x: vjp(grad(f), x)[1](u)[0],
}


@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
def test_the_second_derivative(value: Any, second: Any) -> None:
    expected = slope(grad(value), x, u)
    assert expected.abs().max() > 0.1
    close(second(value)(x), expected)


def test_the_second_derivative_by_autograd(value: Any) -> None:
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(value(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first * u).sum(), leaf)
    close(second, slope(grad(value), x, u))


def test_the_third_derivative(value: Any) -> None:
    bend = SECOND["forward of reverse"](value)
    close(jvp(bend, (x,), (w,))[1], slope(bend, x, w))
    close(grad(lambda x: (bend(x) * w).sum())(x), slope(grad(lambda x: (grad(value)(x) * u).sum()), x, w))


def test_a_gradient_of_each_row_is_that_of_the_numbers_all_rows_share(value: Any) -> None:
    rows = torch.stack([x, u, w])
    close(vmap(grad(value), randomness="same")(rows), torch.stack([grad(value)(row) for row in rows]))
    both = jacfwd(grad(value), randomness="same")
    close(vmap(both, randomness="same")(rows), torch.stack([both(row) for row in rows]))


def test_forward_columns_ask_how_their_vmap_draws(value: Any) -> None:
    """As in eager: jacfwd calls the function inside a vmap."""
    for transform in (hessian, jacfwd):
        with pytest.raises(RuntimeError, match=r"(?i)random"):
            transform(value)(x)


def test_a_tangent_of_noise_alone_is_zero() -> None:
    state, fn = compiled(torch.rand_like, x)
    value, tangent = jvp(lambda x: fn(state, x)[1], (x,), (u,))
    assert_same(tangent, torch.zeros_like(x))
    assert_same(value, fn(state, x)[1])


def test_a_slope_of_uniform_bounds_goes_through_the_affine_part() -> None:
    """`a + (b - a) * u` written out: the draw is a constant, the rest is differentiated."""
    state, fn = compiled(lambda a: a + a * torch.rand_like(a), x)
    f = lambda a: fn(state, a)[1].sum()  # noqa: E731
    close(grad(f)(x), fn(state, x)[1] / x)


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_as_in_torch_a_sample_has_no_slope_by_its_parameters(capture: str) -> None:
    function = lambda a: a + torch.normal(a, a.exp()) + torch.normal(a, 1.0) + torch.normal(1.0, a.exp())  # noqa: E731
    state, fn = compiled(function, x, capture=capture)
    close(grad(lambda a: fn(state, a)[1].sum())(x), torch.ones_like(x))
    close(grad(lambda a: function(a).sum())(x), torch.ones_like(x))
    assert_same(jvp(lambda a: fn(state, a)[1], (x,), (u,))[1], u)
