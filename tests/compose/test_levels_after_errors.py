"""After an error inside a transform, of the model or the user's own, torch is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import scoped_fn as sf
from tests.compose.carried import energy
from tests.compose.case import Function, numbers, stateless
from tests.compose.quiet import QUIET
from tests.compose.trees import stacked
from tests.helpers import assert_same, compiled

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
ARGS = numbers(3), numbers(3, seed=1)


def modes() -> tuple[Any, ...]:
    """What an error could leave on: levels, grad modes, the dual level, dispatch keys."""
    return (
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_fwd_grad_enabled(),
        forward_ad._current_level,
        str(torch._C._dispatch_tls_local_exclude_set()),
        str(torch._C._dispatch_tls_local_include_set()),
    )


class Refusing(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("this backward always raises")


Call = Callable[[Function], Any]
WRONG = numbers(2, seed=5)
BAD_CALLS: dict[str, Call] = {
    "grad": lambda f: grad(f)(WRONG, ARGS[1]),
    "vmap of grad": lambda f: vmap(grad(f), (None, 0))(ARGS[0], stacked(WRONG)),
    "vmap of vmap": lambda f: vmap(vmap(f))(stacked(stacked(WRONG)), stacked(stacked(ARGS[1]))),
    "jvp": lambda f: jvp(f, (WRONG, ARGS[1]), (WRONG, ARGS[1])),
    "jvp of grad": lambda f: jvp(grad(f), (WRONG, ARGS[1]), (WRONG, ARGS[1])),
    "hessian": lambda f: hessian(f)(WRONG, ARGS[1]),
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(f))(WRONG, ARGS[1]),
    "linearize": lambda f: linearize(f, WRONG, ARGS[1]),
    "sf.vmap of sf.grad": lambda f: sf.vmap(sf.grad(lambda s, *a: (s, f(*a))), (None, 0))(
        sf.init_state(), ARGS[0], stacked(WRONG)
    ),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_shape_that_does_not_fit(name: str, mode: Any) -> None:
    state, fn = compiled(energy, ARGS)
    with mode():
        before = modes()
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            BAD_CALLS[name](stateless(fn, state))
        assert modes() == before
    assert_same(vmap(grad(stateless(fn, state)), (None, 0))(ARGS[0], stacked(ARGS[1])),
                vmap(grad(energy), (None, 0))(ARGS[0], stacked(ARGS[1])), **CLOSE)  # fmt: skip


def raises_for_some(x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] == 2:
        raise ValueError("two is one too few")
    return x.sin().sum()


def raises_in_backward(x: torch.Tensor) -> torch.Tensor:
    return Refusing.apply(x).sum()


OVER: dict[str, Callable[[Function, torch.Tensor], Any]] = {
    "grad": lambda f, x: grad(f)(x),
    "vmap of grad": lambda f, x: vmap(grad(f))(stacked(x)),
    "grad of grad": lambda f, x: grad(lambda x: grad(f)(x).sum())(x),
    "jvp of grad": lambda f, x: jvp(grad(f), (x,), (x,)),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones((), dtype=torch.float64)),
    "autograd": lambda f, x: torch.autograd.grad(f(x.clone().requires_grad_()), [x]),
}


@pytest.mark.parametrize("order", OVER)
def test_a_model_that_raises(order: str) -> None:
    state, fn = compiled(raises_for_some, (numbers(3),))
    before = modes()
    with pytest.raises((RuntimeError, TypeError, ValueError), match="two is one too few"):
        OVER[order](stateless(fn, state), numbers(2))
    assert modes() == before
    assert_same(grad(stateless(fn, state))(numbers(3)), numbers(3).cos(), **CLOSE)


@pytest.mark.parametrize("order", [order for order in OVER if order not in ("vmap of grad", "jvp of grad")])
def test_a_backward_that_raises(order: str) -> None:
    state, fn = compiled(raises_in_backward, (numbers(3),))
    before = modes()
    with pytest.raises((RuntimeError, TypeError, ValueError), match="this backward always raises"):
        OVER[order](stateless(fn, state), numbers(3))
    assert modes() == before


def test_an_error_of_the_user_between_the_levels() -> None:
    state, fn = compiled(energy, ARGS)

    def fails(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        fn(state, weight, x)
        raise KeyError("mine")

    before = modes()
    for transformed in (grad(fails), vmap(grad(fails)), lambda *a: jvp(grad(fails), a, a), hessian(fails)):
        with pytest.raises(KeyError, match="mine"):
            transformed(*stacked(ARGS))
        assert modes() == before


def test_an_error_in_a_dual_level() -> None:
    state, fn = compiled(energy, ARGS)
    with forward_ad.dual_level():
        before = modes()
        dual = forward_ad.make_dual(WRONG, WRONG)
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            fn(state, dual, ARGS[1])
        assert modes() == before
        primal, tangent = forward_ad.unpack_dual(fn(state, forward_ad.make_dual(ARGS[0], ARGS[1]), ARGS[1])[1])
    assert_same((primal, tangent), jvp(lambda w: energy(w, ARGS[1]), ARGS[:1], ARGS[1:]), **CLOSE)
