"""A backward marked `once_differentiable` has no second order: it is refused, or what eager makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vmap

from tests.compose.case import Function, numbers, stateless
from tests.compose.custom_forward import Once, OnceFunctional
from tests.compose.quiet import QUIET
from tests.compose.transforms import transform_named
from tests.compose.trees import leaves_of
from tests.helpers import assert_same, compiled

# The older style of Function may run eager at the second order.
pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:Expected .* to stay compiled:UserWarning")]


def close(actual: Any, expected: Any) -> None:
    """Both trees are the same but for rounding."""
    assert_same(actual, expected, rtol=1e-9, atol=1e-11)


SECOND: dict[str, Callable[[Function, torch.Tensor], Any]] = {
    "double backward": lambda f, x: transform_named("double backward").apply(f, (x,)),
    "backward of backward": lambda f, x: backward_of_backward(f, x),
    "grad of grad": lambda f, x: grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(x),
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(f))(x),
    "hessian": lambda f, x: hessian(lambda x: f(x).sum())(x),
    "jvp of grad": lambda f, x: jvp(grad(lambda x: f(x).sum()), (x,), (x,)),
    "vmap of grad of grad": lambda f, x: vmap(grad(lambda x: grad(f)(x)))(x),
}
FORMS: dict[str, Function] = {"as it is": lambda y: y, "doubled": lambda y: y * 2, "squared": lambda y: y**2}
FIRST_ORDER_ONLY = pytest.mark.parametrize("custom", [Once, OnceFunctional], ids=lambda custom: custom.__name__)


def backward_of_backward(function: Function, x: torch.Tensor) -> Any:
    """The gradients that two calls of backward leave behind."""
    own = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(own).sum(), own, create_graph=True)
    slope.square().sum().backward()
    return own.grad


def result_or_none(order: str, function: Function, x: torch.Tensor) -> Any:
    """The second derivative; None if it is refused."""
    try:
        return SECOND[order](function, x)
    except (RuntimeError, NotImplementedError):
        return None


@pytest.mark.parametrize("form", FORMS)
@FIRST_ORDER_ONLY
@pytest.mark.parametrize("order", SECOND)
def test_a_backward_of_first_order_only_is_refused_at_the_second_or_equals_eager(
    custom: Any, order: str, form: str
) -> None:
    """torch.func takes such a backward for a constant in silence, and refuses `Once` for its style."""
    x, styled = numbers(3), OnceFunctional if order not in ("double backward", "backward of backward") else custom
    state, fn = compiled(lambda x: FORMS[form](custom.apply(x)), (x,))
    actual = result_or_none(order, stateless(fn, state), x)
    if actual is not None:
        expected = result_or_none(order, lambda x: FORMS[form](styled.apply(x)), x)
        assert expected is not None, f"eager refuses, got {actual}"
        close(actual, expected)


@FIRST_ORDER_ONLY
def test_a_backward_of_first_order_only_has_a_first_order(custom: Any) -> None:
    (x,), leaves = leaves_of((numbers(3),))
    state, fn = compiled(lambda x: custom.apply(x) * 2, (x,))
    (slope,) = torch.autograd.grad(fn(state, x)[1].sum(), leaves)
    close(slope, 4 * x.detach().cos())
