"""Results that are attributes of arguments: those of the call, not of the example, with the right gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vmap

from tests.compose.case import Function, numbers, stateless
from tests.compose.quiet import QUIET
from tests.compose.trees import scalar, stacked, waves
from tests.helpers import assert_same, compiled, tensors

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def close(actual: Any, expected: Any) -> None:
    """Both trees are the same but for rounding."""
    assert_same(actual, expected, **CLOSE)


def complex_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.complex(numbers(*shape, seed=seed), numbers(*shape, seed=seed + 1))


ATTRIBUTES: dict[str, tuple[Function, bool]] = {
    "x.T": (lambda x: x.T, False),
    "x.mT": (lambda x: x.mT, False),
    "x.H": (lambda x: x.H, True),
    "x.mH": (lambda x: x.mH, True),
    "x.real": (lambda x: x.real, True),
    "x.imag": (lambda x: x.imag, True),
    "x.data": (lambda x: x.data, False),
    "x.real of a real one": (lambda x: x.real, False),
    "x and x.T": (lambda x: (x, x.T), False),
    "x twice": (lambda x: (x, [x]), False),
    "x.T of a product": (lambda x: (x * x).T, False),
    "x.conj()": (lambda x: x.conj(), True),
    "x.detach() and x": (lambda x: (x.detach(), x), False),
}


def draw(is_complex: bool, *shape: int, seed: int = 0) -> torch.Tensor:
    return complex_numbers(*shape, seed=seed) if is_complex else numbers(*shape, seed=seed)


@pytest.mark.parametrize("first_wants", [False, True], ids=["compiled without", "compiled with"])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_of_an_argument_is_that_of_the_call(name: str, first_wants: bool) -> None:
    function, is_complex = ATTRIBUTES[name]
    state, fn = compiled(function, (draw(is_complex, 2, 3).requires_grad_(first_wants),))
    for seed, wants in ((5, False), (6, True), (7, False)):
        x = draw(is_complex, 2, 3, seed=seed).requires_grad_(wants)
        out, expected = fn(state, x)[1], function(x)
        assert_same([one.resolve_conj().detach() for one in tensors(out)],
                    [one.resolve_conj().detach() for one in tensors(expected)])  # fmt: skip
        assert [one.requires_grad for one in tensors(out)] == [one.requires_grad for one in tensors(expected)]
        if wants and any(one.requires_grad for one in tensors(expected)):
            slopes = [torch.autograd.grad(scalar(lambda found=found: found)(), x)[0] for found in (out, expected)]
            close(*slopes)


@pytest.mark.parametrize("name", [name for name in ATTRIBUTES if name != "x.data"])
def test_an_attribute_of_an_argument_under_transforms(name: str) -> None:
    function, is_complex = ATTRIBUTES[name]
    state, fn = compiled(function, (draw(is_complex, 2, 3),))
    call, x = stateless(fn, state), draw(is_complex, 2, 3, seed=5)
    resolved: Function = lambda f: lambda x: [one.resolve_conj() for one in tensors(f(x))]  # noqa: E731
    close(vmap(resolved(call))(stacked(x)), vmap(resolved(function))(stacked(x)))
    close(jvp(resolved(call), (x,), (waves(x),)), jvp(resolved(function), (x,), (waves(x),)))
    if name not in ("x.detach() and x",):
        close(grad(scalar(call))(x), grad(scalar(function))(x))
        close(vmap(grad(scalar(call)))(stacked(x)), vmap(grad(scalar(function)))(stacked(x)))
