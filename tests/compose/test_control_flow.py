"""Choices and loops that stay whole in a graph: derivatives are right, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import scoped_fn as sf
from scoped_fn._elementary import attention, layer_norm
from tests.compose.quiet import QUIET
from tests.helpers import assert_same

pytestmark = [
    *QUIET,
    pytest.mark.filterwarnings("ignore:Expected .* to stay compiled under this transform:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.compile is ignored when called inside torch.export:UserWarning"),
]
X = torch.tensor([0.5, -2.0, 3.0, 1.0], dtype=torch.float64)
V = X.cos()


def cube(x: Tensor) -> Tensor:
    return x**3


def choice(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, cube, (x,))


def eager(x: Tensor) -> Tensor:
    return x.sin() if x.sum() > 0 else cube(x)


def dual(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, V))).tangent


def total(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: (f(x) * V).sum()


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, x: grad(total(f))(x),
    "jvp": lambda f, x: jvp(f, (x,), (V,)),
    "dual numbers": dual,
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "reverse over reverse": lambda f, x: jacrev(jacrev(total(f)))(x),
    "forward over forward": lambda f, x: jacfwd(jacfwd(total(f)))(x),
    "reverse over forward": lambda f, x: jacrev(jacfwd(total(f)))(x),
    "a batch of gradients": lambda f, x: vmap(grad(total(f)))(torch.stack([x, -x])),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_choice_has_the_derivatives_of_its_branch(name: str) -> None:
    state, fn = sf.compile(sf.init_state(), choice, (X,), backend="eager")
    for x in (X, -X):
        found = DERIVATIVES[name](lambda x: fn(state, x)[1], x)
        if name.startswith("a batch"):
            expected: Any = torch.stack([grad(total(eager))(one) for one in (x, -x)])
        else:
            expected = DERIVATIVES[name](eager, x)
        assert_same(found, expected)


def nested(x: Tensor) -> Tensor:
    inner = lambda x: torch.cond(x[0] > 0, torch.cos, torch.exp, (x,))  # noqa: E731
    return torch.cond(x.sum() > 0, inner, cube, (x,))


def nested_eager(x: Tensor) -> Tensor:
    return (x.cos() if x[0] > 0 else x.exp()) if x.sum() > 0 else cube(x)


def normalized(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: F.layer_norm(x, (4,)), cube, (x,))


def normalized_eager(x: Tensor) -> Tensor:
    return layer_norm(x, (4,)) if x.sum() > 0 else cube(x)


def attending(x: Tensor) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        rows = x.reshape(1, 2, 2)
        return F.scaled_dot_product_attention(rows, rows, rows).reshape(4)

    return torch.cond(x.sum() > 0, attend, cube, (x,))


def attending_eager(x: Tensor) -> Tensor:
    rows = x.reshape(1, 2, 2)
    return attention(rows, rows, rows).reshape(4) if x.sum() > 0 else cube(x)


BRANCHES = {
    "a choice": (nested, nested_eager, ["jvp", "dual numbers", "jacfwd", "reverse over reverse"]),
    "a norm": (normalized, normalized_eager, ["jvp", "dual numbers", "forward over forward", "reverse over forward"]),
    "attention": (attending, attending_eager, ["jvp", "dual numbers", "forward over forward"]),
}


@pytest.mark.parametrize(("branch", "use"), [(name, use) for name, (_, _, uses) in BRANCHES.items() for use in uses])
def test_what_is_in_a_branch_is_differentiated_as_outside(branch: str, use: str) -> None:
    model, expected, _ = BRANCHES[branch]
    state, fn = sf.compile(sf.init_state(), model, (X,), backend="eager")
    for x in (X, X.roll(1), -X):
        found = DERIVATIVES[use](lambda x: fn(state, x)[1], x)
        assert_same(found, DERIVATIVES[use](expected, x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("before", [None, "reverse over reverse"], ids=str)
def test_a_hessian_of_a_choice_is_right_or_refused(before: str | None) -> None:
    state, fn = sf.compile(sf.init_state(), choice, (X,), backend="eager")
    f = lambda x: fn(state, x)[1]  # noqa: E731
    if before is not None:
        DERIVATIVES[before](f, X)
    try:
        found = hessian(total(f))(X)
    except sf.CaptureError as error:  # forward over reverse needs shapes, for which no branch can be chosen
        assert before is None
        assert "Expected a function that runs under this transform" in str(error)
    else:
        assert_same(found, hessian(total(eager))(X))


def scan(x: Tensor) -> Tensor:
    from torch._higher_order_ops import scan

    return scan(lambda carry, y: (carry + y.sin(), carry * y), x.sum() * 0, x)[1]


def loop(x: Tensor) -> Tensor:
    from torch._higher_order_ops import while_loop

    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.zeros((), dtype=torch.int64), x))[1]


@pytest.mark.parametrize("model", [scan, loop], ids=["scan", "while_loop"])
@pytest.mark.parametrize("name", ["jvp", "dual numbers", "jacfwd", "reverse over reverse"])
def test_a_derivative_of_a_loop_that_torch_has_no_rule_for_is_refused(name: str, model: Any) -> None:
    state, fn = sf.compile(sf.init_state(), model, (X,), backend="eager")
    assert grad(lambda x: fn(state, x)[1].sum())(X).abs().max() > 0
    with pytest.raises(sf.CaptureError, match=r"got: torch has no .* rule of (scan|while_loop)\."):
        DERIVATIVES[name](lambda x: fn(state, x)[1], X)
