"""What a compiled function shows of itself: names, graphs, a short text; and that it is frozen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.helpers import assert_same, compiled

X = torch.ones(4, 3)


def test_the_owner_is_named_after_the_class_or_function() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    state, of_module = compiled(nn.Linear(3, 2), (X,))
    state, of_function = sf.compile(state, scaled, (X,), backend="eager")
    state, named = sf.compile(state, scaled, (X,), backend="eager", name="the doubler")
    assert [of_module.name, of_function.name, named.name] == ["Linear", "scaled", "the doubler"]
    assert [state.owners[fn.owner].name for fn in (of_module, of_function, named)] == [
        "Linear",
        "scaled",
        "the doubler",
    ]
    assert len({of_module.owner, of_function.owner, named.owner}) == 3


def test_repr_is_short_and_says_what_it_is() -> None:
    _, fn = compiled(nn.Linear(3, 2), (X,))
    text = repr(fn)
    assert len(text) < 300
    assert "\n" not in text
    for word in ("CompiledFn", "Linear", "eager", "training", "8"):
        assert word in text
    assert "tensor(" not in text


def test_graphs_are_there_for_the_kind_that_was_compiled() -> None:
    _, training = compiled(nn.Linear(3, 2), (X,))
    assert all(graph is not None for graph in (training.joint_graph, training.forward_graph, training.backward_graph))
    with torch.no_grad():
        _, inference = compiled(nn.Linear(3, 2), (X,))
    assert (inference.joint_graph, inference.backward_graph) == (None, None)
    for fn in (training, inference):
        assert "addmm" in str(fn.forward_graph)
        assert "weight: float32[2, 3]" in str(fn.forward_graph)
        assert "linear" in str(fn.captured)


def test_a_compiled_function_is_frozen() -> None:
    _, fn = compiled(nn.Linear(3, 2), (X,))
    with pytest.raises(dataclasses.FrozenInstanceError, match="owner"):
        fn.owner = 5  # type: ignore[misc]
    fn.params["weight"] = torch.zeros(2, 3)  # type: ignore[assignment]
    assert fn.params["weight"] is not None
    assert fn.params["weight"].any(), "the dictionary is the caller's own"


def test_compiling_a_compiled_function_is_possible_or_refused_in_words() -> None:
    state, inner = compiled(torch.sin, (X,))
    try:
        state, outer = sf.compile(state, lambda x: inner(state, x)[1] * 2, (X,), backend="eager")
    except (sf.CaptureError, sf.SpecError) as error:
        assert "Expected" in str(error)
        return
    assert_same(outer(state, X)[1], X.sin() * 2)


def test_two_compiles_of_one_model_are_independent() -> None:
    model = nn.BatchNorm1d(3)
    state, first = compiled(model, (X,))
    state, second = sf.compile(state, model, (X,), backend="eager")
    state, _ = first(state, first.params, X)
    assert state.buffers[first.owner]["num_batches_tracked"].item() == 1
    assert state.buffers[second.owner]["num_batches_tracked"].item() == 0
    assert first.params["weight"] is second.params["weight"]


class Tripler:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


@pytest.mark.parametrize(
    "function", [Tripler(), Tripler().method, functools.partial(torch.mul, other=3), lambda *tensors: tensors[0] * 3]
)
def test_anything_that_can_be_called_can_be_compiled(function: Callable[..., torch.Tensor]) -> None:
    state, fn = compiled(function, (X,))
    assert_same(fn(state, X)[1], X * 3)
    assert isinstance(fn.name, str)


def test_a_compiled_function_inside_torch_compile_gives_the_right_value() -> None:
    state, fn = compiled(lambda x: x * 2, (X,))
    outer = torch.compile(lambda x: fn(state, x)[1] + 1, backend="eager")
    assert_same(outer(X), X * 2 + 1)
