"""torch's own checks against finite differences: first and second order, reverse, forward and batched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils import _pytree as torch_pytree

from tests.compose.case import Arguments, Function, compiled_call, eager_call, over_differentiable
from tests.compose.quiet import QUIET
from tests.compose.transforms import case_named
from tests.compose.trees import leaves_of, smooth
from tests.helpers import assert_same, compiled

pytestmark = [
    *QUIET,
    # gradcheck moves inputs of functions that torch runs without gradients.
    pytest.mark.filterwarnings("ignore:Input #:UserWarning"),
]

SIDES = pytest.mark.parametrize("side", ["eager", "compiled"])
NAMES = ["small mlp", "batch norm evaluated", "written attention", "convolution", "running sums", "loop", "outputs",
         "dict input", "broadcasting", "contraction", "matrix exponential", "in place", "scattered", "complex inside",
         "complex argument", "unused", "closed over"]  # fmt: skip
SOME = ["small mlp", "convolution", "loop", "outputs", "dict input", "in place", "complex argument", "unused"]


def flat(name: str, side: str) -> tuple[Function, list[torch.Tensor], Callable[[], int]]:
    """A case as a function of flat leaves, the leaves, and how often something ran eager."""
    case = case_named(name)
    call, fn = compiled_call(case) if side == "compiled" else (eager_call(case), None)
    function, args = over_differentiable(case, call)
    own, leaves = leaves_of(args)
    structure = torch_pytree.tree_structure(own)
    taken = lambda *given: smooth(function)(*torch_pytree.tree_unflatten(list(given), structure))  # noqa: E731
    return taken, leaves, lambda: fn.cache_info().eager_calls if fn else 0


@SIDES
@pytest.mark.parametrize("name", NAMES)
def test_first_derivatives_in_reverse(name: str, side: str) -> None:
    function, leaves, eager_calls = flat(name, side)
    assert gradcheck(function, leaves, check_batched_grad=True)
    assert eager_calls() == 0


@SIDES
@pytest.mark.parametrize("name", NAMES)
def test_first_derivatives_forward(name: str, side: str) -> None:
    function, leaves, eager_calls = flat(name, side)
    assert gradcheck(function, leaves, check_forward_ad=True, check_backward_ad=False, check_undefined_grad=False,
                     check_batched_grad=False)  # fmt: skip
    assert eager_calls() == 0


@SIDES
@pytest.mark.parametrize("name", [name for name in SOME if name != "complex argument"])  # torch asserts on its views
def test_first_derivatives_forward_under_vmap(name: str, side: str) -> None:
    function, leaves, eager_calls = flat(name, side)
    assert gradcheck(function, leaves, check_forward_ad=True, check_backward_ad=False, check_undefined_grad=False,
                     check_batched_grad=False, check_batched_forward_grad=True)  # fmt: skip
    assert eager_calls() == 0


@SIDES
@pytest.mark.parametrize("name", SOME)
def test_second_derivatives_in_reverse(name: str, side: str) -> None:
    function, leaves, eager_calls = flat(name, side)
    assert gradgradcheck(function, leaves)
    assert eager_calls() == 0


@SIDES
@pytest.mark.parametrize("name", SOME)
def test_second_derivatives_forward_over_reverse(name: str, side: str) -> None:
    function, leaves, eager_calls = flat(name, side)
    assert gradgradcheck(function, leaves, check_fwd_over_rev=True, check_rev_over_rev=False,
                         check_undefined_grad=False)  # fmt: skip
    assert eager_calls() == 0


def infinite_slope(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(), x.sqrt()


def first_only(function: Function) -> Function:
    """The function's first result alone."""
    return lambda *args: function(*args)[0]


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: torch.func.grad(first_only(f)),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda x: first_only(f)(x[None]))),
    "jacrev": lambda f: torch.func.jacrev(first_only(f)),
    "grad of grad": lambda f: torch.func.grad(lambda x: (torch.func.grad(first_only(f))(x) * x).sum()),
}


@SIDES
@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_unused_result_with_an_infinite_derivative_spoils_nothing(name: str, side: str) -> None:
    x: Arguments = (torch.zeros(3, dtype=torch.float64),)
    function: Function = infinite_slope
    if side == "compiled":
        state, fn = compiled(infinite_slope, x)
        function = lambda *args: fn(state, *args)[1]  # noqa: E731
    assert_same(TRANSFORMS[name](function)(*x), torch.ones(3, dtype=torch.float64))
