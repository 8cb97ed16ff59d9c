"""After use under transforms no compiled function stays alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jvp, linearize, vjp, vmap

import scoped_fn as sf
from tests.compose.carried import energy, normed
from tests.compose.case import Function, numbers, stateless
from tests.compose.quiet import QUIET
from tests.compose.trees import mapped, stacked, waves
from tests.helpers import assert_same, compiled

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
ARGS = numbers(3), numbers(3, seed=1)


def double_backward(function: Function) -> Any:
    """Gradients by create_graph, with the graph of the first still alive when it returns."""
    leaves = [arg.clone().requires_grad_() for arg in ARGS]
    first = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
    return first, torch.autograd.grad(first[0].square().sum(), leaves)


USES: dict[str, Callable[[Function], Any]] = {
    "grad": lambda f: grad(f)(*ARGS),
    "vmap of grad": lambda f: vmap(grad(f), (None, 0))(ARGS[0], stacked(ARGS[1])),
    "hessian": lambda f: hessian(f)(*ARGS),
    "jvp": lambda f: jvp(f, ARGS, waves(ARGS)),
    "vjp": lambda f: vjp(f, *ARGS),
    "linearize": lambda f: linearize(f, *ARGS),
    "create_graph": double_backward,
    "an unused graph": lambda f: f(*[arg.clone().requires_grad_() for arg in ARGS]),
}


@pytest.mark.parametrize("use", USES)
def test_nothing_stays_alive(use: str) -> None:
    def run() -> list[weakref.ref[Any]]:
        state, fn = compiled(energy, ARGS)
        result = USES[use](stateless(fn, state))
        del result
        return [weakref.ref(fn), weakref.ref(fn.captured.graph.gm)]

    watched = run()
    gc.collect()
    assert [one() for one in watched] == [None, None]


def test_nothing_stays_alive_of_a_module_with_a_state() -> None:
    def run() -> list[weakref.ref[Any]]:
        one = normed()
        state, _ = sf.vmap(sf.grad(one.loss), in_dims=(0, None), state_dim=0)(
            mapped(lambda leaf: torch.stack([leaf] * 3), one.state), stacked(one.params), numbers(4, 2)
        )
        return [weakref.ref(one.fn), weakref.ref(one.fn.captured.source.call), weakref.ref(state)]

    watched = run()
    gc.collect()
    assert [one() for one in watched] == [None, None, None]


def test_the_result_keeps_only_what_its_backward_needs() -> None:
    state, fn = compiled(energy, ARGS)
    leaf = ARGS[0].clone().requires_grad_()
    out = fn(state, leaf, ARGS[1])[1]
    watched = weakref.ref(fn)
    del fn
    gc.collect()
    (slope,) = torch.autograd.grad(out, leaf, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), leaf)
    twin = grad(lambda w: grad(energy)(w, ARGS[1]).sum())(ARGS[0])
    assert_same((slope.detach(), second), (grad(energy)(*ARGS), twin), **CLOSE)
    del out, slope, second
    gc.collect()
    assert watched() is None
