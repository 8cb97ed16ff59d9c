"""What the carry-first transforms refuse, and that a refusal leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import vmap

import scoped_fn as sf
from tests.compose.carried import SUBJECTS, StatefulFn
from tests.compose.case import numbers
from tests.compose.quiet import QUIET
from tests.compose.trees import mapped
from tests.helpers import assert_same, compiled

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def unreduced(state: sf.CompilerState, x: torch.Tensor) -> tuple[sf.CompilerState, torch.Tensor]:
    return state, x * 2


def summed(state: sf.CompilerState, x: torch.Tensor) -> tuple[sf.CompilerState, torch.Tensor]:
    return state, (x * x).sum()


def wrong(kind: str) -> tuple[sf.CompilerState, StatefulFn, StatefulFn]:
    """A state, a function with a scalar value and one without, compiled or the user's own."""
    if kind == "own":
        return sf.init_state(), summed, unreduced
    state, scalar_fn = compiled(lambda x: (x * x).sum(), (numbers(3),))
    state, vector_fn = sf.compile(state, lambda x: x * 2, (numbers(3),), backend="eager")
    return state, scalar_fn, vector_fn


@pytest.mark.parametrize("kind", ["own", "compiled"])
@pytest.mark.parametrize("make", [sf.grad, sf.value_and_grad], ids=lambda make: make.__name__)
def test_what_gradients_refuse(make: Any, kind: str) -> None:
    state, scalar_fn, vector_fn = wrong(kind)
    x = numbers(3)
    for argnums in (-1, (0, -2), (0.5,)):
        with pytest.raises(sf.SpecError, match="Expected argnums of 0 or more, got"):
            make(scalar_fn, argnums=argnums)
    for argnums in (1, (0, 2)):
        with pytest.raises(sf.SpecError, match="Expected argnums (below 1|from 0 to 0), got"):
            make(scalar_fn, argnums=argnums)(state, x)
    with pytest.raises(sf.SpecError, match="Expected a scalar to differentiate.*Reduce it"):
        make(vector_fn)(state, x)
    with pytest.raises(sf.SpecError, match="Expected a scalar to differentiate"):
        vmap(lambda row: make(vector_fn)(state, row)[1])(numbers(2, 3))
    assert_same(sf.grad(scalar_fn)(state, x)[1], 2 * x, **CLOSE)  # nothing is left behind


@pytest.mark.parametrize("kind", ["own", "compiled"])
def test_an_integer_argument_is_refused(kind: str) -> None:
    state, fn = compiled(lambda x, i: (x * i).sum(), (numbers(3), torch.arange(3)))
    function: StatefulFn = fn if kind == "compiled" else lambda state, x, i: fn(state, x, i)
    with pytest.raises(sf.SpecError, match="floating point tensors to differentiate, got torch.int64"):
        sf.grad(function, argnums=1)(state, numbers(3), torch.arange(3))
    with pytest.raises(sf.SpecError, match="Expected argument 1 to have floating point tensors"):
        sf.grad(function, argnums=(0, 1))(state, numbers(3), torch.arange(3))
    rows = sf.vmap(sf.grad(function), in_dims=(None, 0))(state, numbers(3), torch.arange(6).reshape(2, 3))[1]
    assert_same(rows, torch.arange(6.0, dtype=torch.float64).reshape(2, 3), **CLOSE)


@pytest.mark.parametrize("make", [sf.grad, sf.value_and_grad], ids=lambda make: make.__name__)
def test_what_cannot_be_called_is_refused(make: Any) -> None:
    with pytest.raises(sf.SpecError, match="Expected a stateful function, .*, got a int"):
        make(3)


def test_sizes_that_do_not_fit_are_vmaps_error() -> None:
    one = SUBJECTS["compiled function"]()
    with pytest.raises(ValueError, match="vmap"):
        sf.vmap(one.function)(one.state, numbers(2, 3), numbers(4, 3))
    assert_same(sf.vmap(one.function)(one.state, *mapped(lambda leaf: leaf[None], one.args))[1],
                one.twin(*one.args)[None], **CLOSE)  # fmt: skip
