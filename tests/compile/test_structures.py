"""Structured inputs and outputs keep their structure from end to end."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

import scoped_fn as sf
from tests.helpers import assert_same, compiled

Point = namedtuple("Point", ["x", "y"])


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Registered:
    features: torch.Tensor
    label: str


@dataclasses.dataclass
class Unregistered:
    features: torch.Tensor
    scale: float


torch_pytree.register_dataclass(Registered)

A, B = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])

FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "dict": (lambda batch: {"sum": batch["a"] + batch["b"], "a": batch["a"] * 2}, ({"a": A, "b": B},)),
    "nested": (lambda tree: [tree[0]["k"][1] * 2, (tree[1], {"deep": [tree[1] + 1]})], ([{"k": (A, B)}, B],)),
    "ordered": (lambda tree: OrderedDict(z=tree["y"] - 1, y=tree["z"] + 1), (OrderedDict(z=A, y=B),)),
    "namedtuple": (lambda point: Point(point.y * 2, point.x), (Point(A, B),)),
    "typed namedtuple": (lambda pair: Pair(pair.right, pair.left * pair.right), (Pair(A, B),)),
    "none in": (lambda x, mask: x if mask is None else x * mask, (A, None)),
    "none out": (lambda x: (None, x + 1, None), (A,)),
    "only none": (lambda x: None, (A,)),
    "numbers out": (lambda x: (x + 1, 3, 2.5, True, "text"), (A,)),
    "number in": (lambda x, n: x * n, (A, 3)),
    "text in": (lambda x, how: x.sum() if how == "sum" else x.mean(), (A, "sum")),
    "bool in": (lambda x, flip: x.flip(0) if flip else x + 0, (A, True)),
    "empty containers": (lambda x, a, b: {"a": a, "b": b, "x": x * 1}, (A, [], {})),
    "single in list": (lambda x: [x + 1], (A,)),
    "no tensors": (lambda n: n, (4,)),
    "no inputs": (lambda: torch.ones(2) * 3, ()),
    "no operation": (lambda x: x, (A,)),
    "input inside": (lambda x, y: {"x": x, "y": (y, x + y)}, (A, B)),
    "size out": (lambda x: (x * 2, x.shape), (A,)),
    "shape out": (lambda x: (x * 2, x.shape[0], tuple(x.shape)), (A,)),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_structure_is_that_of_eager(name: str, needs_grad: bool) -> None:
    function, inputs = FUNCTIONS[name]
    inputs = torch_pytree.tree_map(
        lambda leaf: leaf.clone().requires_grad_(needs_grad) if isinstance(leaf, torch.Tensor) else leaf, inputs
    )
    state, fn = compiled(function, inputs)
    _, out = fn(state, *inputs)
    expected = function(*inputs)
    assert type(out) is type(expected)
    assert_same(out, expected)


def test_a_registered_dataclass_goes_in_and_out() -> None:
    def function(record: Registered) -> Registered:
        return Registered(record.features * 2, record.label)

    state, fn = compiled(function, (Registered(A, "cat"),))
    _, out = fn(state, Registered(B, "cat"))
    assert isinstance(out, Registered)
    assert out.label == "cat"
    assert_same(out.features, B * 2)


def test_an_unregistered_dataclass_works_or_is_refused_by_name() -> None:
    def function(record: Unregistered) -> Unregistered:
        return Unregistered(record.features * record.scale, record.scale)

    try:
        state, fn = compiled(function, (Unregistered(A, 2.0),))
        _, out = fn(state, Unregistered(B, 2.0))
        _, scaled = fn(state, Unregistered(B, 3.0))
    except (TypeError, sf.CaptureError) as error:
        assert "Expected" in str(error)
        assert "Unregistered" in str(error)
        assert "register" in str(error)
        return
    assert isinstance(out, Unregistered)
    assert_same(out.features, B * 2)
    assert_same(scaled.features, B * 3)


def test_keyword_arguments_go_by_name() -> None:
    def function(x: torch.Tensor, *, scale: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return x * scale - shift

    state, fn = compiled(function, (A,), {"scale": B, "shift": 1.0})
    assert_same(fn(state, A, shift=1.0, scale=B)[1], A * B - 1)
    assert_same(fn(state, A, scale=B)[1], A * B)


def test_dictionary_order_does_not_matter() -> None:
    state, fn = compiled(lambda batch: batch["a"] - batch["b"], ({"a": A, "b": B},))
    assert_same(fn(state, {"b": B, "a": A})[1], A - B)


def test_an_output_dictionary_keeps_its_order() -> None:
    state, fn = compiled(lambda x: {"z": x + 1, "a": x, "m": x * 2}, (A,))
    assert list(fn(state, A)[1]) == ["z", "a", "m"]


def test_the_same_tensor_twice_is_two_arguments() -> None:
    x = A.clone().requires_grad_()
    state, fn = compiled(lambda a, b: a * b, (x, x))
    fn(state, x, x)[1].sum().backward()
    assert_same(x.grad, 2 * A)
    one, other = A.clone().requires_grad_(), B.clone().requires_grad_()
    _, out = fn(state, one, other)
    assert_same(out, A * B)
    out.sum().backward()
    assert_same([one.grad, other.grad], [B, A])


def test_model_with_structured_inputs_and_outputs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, batch: dict[str, Any], *, scale: float) -> Any:
            hidden = self.linear(batch["x"])
            return (hidden * scale, {"loss": (hidden - batch["target"]).square().mean(), "extra": None})

    model, batch = Model(), {"x": torch.randn(3, 2), "target": torch.zeros(3, 2)}
    state, fn = compiled(model, (batch,), {"scale": 2.0})
    state, out = fn(state, fn.params, batch, scale=2.0)
    assert_same(out, model(batch, scale=2.0))
    out[1]["loss"].backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(batch, scale=2.0)[1]["loss"].backward()
    assert_same(ours, [parameter.grad for parameter in model.parameters()])


def test_a_state_inside_a_user_function_is_an_ordinary_tree() -> None:
    inner = sf.state.set_buffers(*sf.acquire(sf.init_state(), "inner"), {"mean": torch.ones(2)})
    state, fn = compiled(lambda held, x: held.buffers[0]["mean"] + x, (inner, A))
    assert_same(fn(state, inner, A)[1], A + 1)
