"""Bad input gives one clear error at the front door, and leaves state and process as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.helpers import assert_mentions, assert_same, compiled, process_unchanged

X = torch.ones(4, 3)
FORM = r"(?s)Expected .*, got .*\."


def _linear() -> tuple[sf.CompilerState, sf.CompiledFn]:
    torch.manual_seed(0)
    return compiled(nn.Linear(3, 2), (X,))


def _without(params: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: one for key, one in params.items() if key != name}


BAD_CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "no state": (lambda state, fn: fn(fn.params, X), "CompilerState"),
    "no parameters": (lambda state, fn: fn(state), "params"),
    "tensor for params": (lambda state, fn: fn(state, X), "params"),
    "missing parameter": (lambda state, fn: fn(state, _without(fn.params, "bias"), X), "bias"),
    "unknown parameter": (lambda state, fn: fn(state, {**fn.params, "extra": X}, X), "extra"),
    "parameter shape": (lambda state, fn: fn(state, {**fn.params, "bias": torch.ones(5)}, X), r"bias.*5"),
    "parameter dtype": (
        lambda state, fn: fn(state, {**fn.params, "bias": torch.ones(2).double()}, X),
        r"bias.*float64",
    ),
    "parameter device": (
        lambda state, fn: fn(state, {**fn.params, "bias": torch.ones(2, device="meta")}, X),
        r"bias.*meta",
    ),
    "parameter type": (lambda state, fn: fn(state, {**fn.params, "bias": [1.0, 2.0]}, X), r"bias.*list"),
    "input device": (lambda state, fn: fn(state, fn.params, X.to("meta")), "meta"),
    "missing input": (lambda state, fn: fn(state, fn.params), "input"),
    "extra input": (lambda state, fn: fn(state, fn.params, X, X), "x|input|argument"),
    "unknown keyword": (lambda state, fn: fn(state, fn.params, X, mask=X), "mask"),
    "other structure": (lambda state, fn: fn(state, fn.params, [X]), r"input\[0\]|list"),
    "sparse tensor": (lambda state, fn: fn(state, fn.params, X.to_sparse()), "sparse"),
    "array of numpy": (lambda state, fn: fn(state, fn.params, X.numpy()), "ndarray"),
    "any object": (lambda state, fn: fn(state, fn.params, object()), "object"),
    "text for a tensor": (lambda state, fn: fn(state, fn.params, "rows"), "str|rows"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_is_refused_in_words(name: str) -> None:
    call, names = BAD_CALLS[name]
    state, fn = _linear()
    expected = fn(state, fn.params, X)[1]
    before = fn.cache_info().captures
    with process_unchanged(), pytest.raises(sf.SpecError, match=FORM) as caught:
        call(state, fn)
    assert_mentions(caught.value, names)
    assert len(str(caught.value)) < 800, "an error is read by people"
    assert fn.cache_info().captures == before
    assert_same(fn(state, fn.params, X)[1], expected)


BAD_COMPILES: dict[str, tuple[Callable[[], Any], str]] = {
    "no state": (lambda: sf.compile(torch.cos, torch.sin, (X,)), "CompilerState"),
    "inputs not a tuple": (lambda: compiled(torch.sin, X), "tuple"),
    "inputs a list": (lambda: compiled(torch.sin, [X]), "tuple"),
    "kwargs not a dict": (lambda: compiled(torch.sin, (X,), [1]), "kwargs"),
    "model not callable": (lambda: compiled(3, (X,)), "int"),
    "unknown backend": (lambda: compiled(torch.sin, (X,), backend="indcutor"), "indcutor"),
    "backend not callable": (lambda: compiled(torch.sin, (X,), backend=3), "backend"),
    "unknown capture": (lambda: compiled(torch.sin, (X,), capture="magic"), "magic"),
    "unknown rng": (lambda: compiled(torch.sin, (X,), rng="numpy"), "numpy"),
    "passes not Passes": (lambda: compiled(torch.sin, (X,), passes={"joint": None}), "Passes"),
    "pass gives None": (lambda: compiled(torch.sin, (X,), passes=sf.Passes(captured=lambda gm: None)), "GraphModule"),
    "name not text": (lambda: compiled(torch.sin, (X,), name=3), "name"),
    "negative argnums": (lambda: sf.value_and_grad(compiled(torch.sin, (X,))[1], argnums=-1), "argnums"),
    "nothing to differentiate": (lambda: sf.value_and_grad(3), "int"),
}


@pytest.mark.parametrize("name", BAD_COMPILES)
def test_a_bad_option_is_refused_in_words(name: str) -> None:
    build, names = BAD_COMPILES[name]
    with process_unchanged(), pytest.raises(sf.SpecError, match=FORM) as caught:
        build()
    assert_mentions(caught.value, names)


def test_what_is_no_pass_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Expected joint .*function.*, got 3\."):
        sf.Passes(joint=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Expected .*function.*, got 3\."):
        sf.passes.chain(sf.passes.identity, 3)  # type: ignore[arg-type]


def test_keyword_only_options_stay_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        sf.compile(sf.init_state(), torch.sin, (X,), None, "eager")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("function", "got"),
    [(lambda x: x * 2, "shape|scalar"), (lambda x: x.sum() > 0, "bool"), (lambda x: (x.sum(), x), "tuple")],
    ids=["vector", "bool", "tuple"],
)
def test_value_and_grad_wants_one_scalar(function: Callable[..., Any], got: str) -> None:
    state, fn = compiled(function, (X,))
    with pytest.raises(sf.SpecError, match=FORM) as caught:
        sf.value_and_grad(fn)(state, X)
    assert_mentions(caught.value, got)


def test_value_and_grad_wants_something_to_differentiate() -> None:
    state, fn = compiled(lambda n: n.sum() * 1.0, (torch.arange(3),))
    with pytest.raises(sf.SpecError, match=FORM):
        sf.value_and_grad(fn)(state, torch.arange(3))


def test_a_released_function_is_refused() -> None:
    state, fn = _linear()
    released = sf.release(state, fn)
    with pytest.raises(sf.OwnershipError, match=r"Expected .*, got .*released"):
        fn(released, fn.params, X)
    with pytest.raises(sf.OwnershipError, match=r"Expected .*, got .*released"):
        sf.value_and_grad(fn)(released, fn.params, X)
    fn(state, fn.params, X)


def test_a_state_that_never_saw_the_function_is_refused() -> None:
    _, fn = _linear()
    with pytest.raises(sf.OwnershipError, match=r"Expected .*, got .*"):
        fn(sf.init_state(), fn.params, X)


def test_a_state_in_which_the_token_is_somebody_elses_is_refused() -> None:
    _, fn = compiled(nn.BatchNorm1d(3), (X,))
    other, stranger = compiled(torch.sin, (X,))
    assert stranger.owner == fn.owner, "same program, same tokens"
    with pytest.raises((sf.OwnershipError, sf.SpecError), match=r"Expected .*, got .*"):
        fn(other, fn.params, X)


def test_errors_are_subclasses_of_built_in_ones() -> None:
    assert issubclass(sf.CaptureError, RuntimeError)
    assert issubclass(sf.MutationError, sf.CaptureError)
    assert issubclass(sf.RandomOpError, sf.CaptureError)
    assert issubclass(sf.SpecError, TypeError)


def test_a_call_with_a_shape_the_model_cannot_take_keeps_everything() -> None:
    state, fn = _linear()
    expected = fn(state, fn.params, X)[1]
    with process_unchanged(), pytest.raises(sf.SpecError, match=r"Expected .*4, 3.*, got .*4, 7"):
        fn(state, fn.params, torch.ones(4, 7))
    assert_same(fn(state, fn.params, X)[1], expected)
