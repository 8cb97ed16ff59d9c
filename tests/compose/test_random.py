"""Random numbers under transforms: vmap's `randomness` is obeyed, and a backward uses the draw of its forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad, grad_and_value, jvp, vmap

import scoped_fn as sf
from tests.compose.case import Function, numbers, stateless
from tests.compose.quiet import QUIET
from tests.helpers import assert_same, compiled

pytestmark = QUIET

SIDES = pytest.mark.parametrize("side", ["eager", "compiled", "keyed"])
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5) * x


def subject(side: str) -> Function:
    """The function, or the compiled one as a plain function."""
    if side == "eager":
        return dropped
    state, fn = compiled(dropped, (numbers(40),), rng="torch" if side == "compiled" else "key")
    return stateless(fn, state)


@SIDES
def test_vmap_refuses_random_operations_by_default(side: str) -> None:
    function = subject(side)
    with pytest.raises(RuntimeError, match="(?i)random"):
        vmap(function)(numbers(3, 40))


@SIDES
@pytest.mark.parametrize("in_dims", [0, None], ids=["batched", "not batched"])
def test_vmap_draws_as_it_is_asked(side: str, in_dims: int | None) -> None:
    function, x, sample = subject(side), numbers(40).abs() + 1, torch.arange(3)
    given = x.expand(3, -1) if in_dims == 0 else x
    mapped = lambda x, _: function(x)  # noqa: E731
    one, *others = vmap(mapped, (in_dims, 0), randomness="same")(given, sample)
    assert all(torch.equal(one, other) for other in others)
    one, *others = vmap(mapped, (in_dims, 0), randomness="different")(given, sample)
    assert not any(torch.equal(one, other) for other in others)


@SIDES
def test_a_gradient_belongs_to_its_own_draw(side: str) -> None:
    function, x = subject(side), numbers(40)
    total = lambda x: (function(x).sum(), function(x))  # noqa: E731
    slopes, (value, _) = grad_and_value(total, has_aux=True)(x)
    assert_same((slopes * x).sum() / 2, value, **CLOSE)
    batched = vmap(grad_and_value(lambda x: function(x).sum()), randomness="different")
    slopes, values = batched(x.expand(3, -1))
    assert_same((slopes * x).sum(1) / 2, values, **CLOSE)
    assert not torch.equal(slopes[0], slopes[1])


@SIDES
def test_a_second_derivative_and_a_tangent_belong_to_the_same_draw(side: str) -> None:
    function, x = subject(side), numbers(40)
    value, tangent = jvp(function, (x,), (x,))
    assert_same(tangent, 2 * value, **CLOSE)
    if side == "compiled":
        with pytest.raises(sf.RandomOpError, match="would draw other numbers"):
            jvp(grad(lambda x: function(x).sum()), (x,), (x,))
        return
    slope, bend = jvp(grad(lambda x: function(x).sum()), (x,), (x,))
    assert_same(bend, slope, **CLOSE)


@pytest.mark.parametrize("transform", [grad, grad_and_value], ids=["grad", "grad_and_value"])
def test_the_draws_are_eagers(transform: Any) -> None:
    x, found = numbers(40), []
    for side in ("eager", "compiled"):
        function = subject(side)
        torch.manual_seed(3)
        found.append(transform(lambda x, function=function: function(x).sum())(x))
    assert_same(found[1], found[0], **CLOSE)
