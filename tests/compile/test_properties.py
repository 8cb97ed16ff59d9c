"""Random small functions and shapes, in float64: values, gradients and purity equal eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scoped_fn as sf
from tests.cases.casekit import weighted_loss
from tests.helpers import assert_disjoint, compiled, tensors, unchanged

Function = Callable[[torch.Tensor, torch.Tensor], Any]

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "square": torch.square,
    "relu": torch.relu,
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(-1),
    "flip": lambda x: x.flip(0),
    "double transpose": lambda x: (x.t() * 2).t(),
    "centred": lambda x: x - x.mean(0),
    "clamp": lambda x: x.clamp(-1, 1),
    "roundtrip": lambda x: x.reshape(-1).view(x.shape),
    "padded": lambda x: torch.nn.functional.pad(x, (1, 1))[:, 1:-1],
    "half detached": lambda x: x * x.detach(),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "matmul": lambda x, y: x @ y.t() @ x,
    "stack": lambda x, y: torch.stack([x, y]).sum(0),
    "first": lambda x, y: x,
    "outer": lambda x, y: torch.einsum("ij,kj->ik", x, y) @ y,
}
OUTPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "one": lambda a, b: a,
    "pair": lambda a, b: (a, b),
    "dict": lambda a, b: {"sum": a.sum(), "both": [a, b]},
    "aliases": lambda a, b: (a, a, a.t(), b[0]),
}


@st.composite
def programs(draw: Any) -> tuple[list[tuple[str, str, str]], str]:
    """A list of (binary, unary, unary) steps and how the results are returned."""
    step = st.tuples(st.sampled_from(sorted(BINARY)), st.sampled_from(sorted(UNARY)), st.sampled_from(sorted(UNARY)))
    return draw(st.lists(step, min_size=1, max_size=4)), draw(st.sampled_from(sorted(OUTPUTS)))


def _function(program: tuple[list[tuple[str, str, str]], str]) -> Function:
    steps, output = program

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        for binary, left, right in steps:
            x, y = UNARY[left](BINARY[binary](x, y)), UNARY[right](y)
        return OUTPUTS[output](x, y)

    return function


def _leaves(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(rows, columns, dtype=torch.float64, generator=generator) for _ in range(2))
    return one.requires_grad_(), other.requires_grad_()


def _views(trees: Any) -> list[Any]:
    return [one.detach().numpy() for one in tensors(trees)]


def _check(fn: sf.CompiledFn, state: sf.CompilerState, function: Function, inputs: tuple[torch.Tensor, ...]) -> None:
    ours = tuple(one.detach().clone().requires_grad_() for one in inputs)
    theirs = tuple(one.detach().clone().requires_grad_() for one in inputs)
    with unchanged(ours):
        after, out = fn(state, *ours)
    expected = function(*theirs)
    assert after is state
    assert_disjoint(ours, out)
    chex.assert_trees_all_close(_views(out), _views(expected), rtol=1e-9, atol=1e-9)
    chex.assert_trees_all_equal_shapes_and_dtypes(_views(out), _views(expected))
    assert [one.requires_grad for one in tensors(out)] == [one.requires_grad for one in tensors(expected)]
    weighted_loss(out).backward()
    weighted_loss(expected).backward()
    assert [one.grad is None for one in ours] == [one.grad is None for one in theirs]
    grads = [[one.grad for one in leaves if one.grad is not None] for leaves in (ours, theirs)]
    chex.assert_trees_all_close(_views(grads[0]), _views(grads[1]), rtol=1e-8, atol=1e-8)
    chex.assert_tree_all_finite(_views(grads[0]))


@given(programs(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_a_random_function_equals_eager(program: Any, rows: int, columns: int, seed: int) -> None:
    function, inputs = _function(program), _leaves(rows, columns, seed)
    state, fn = compiled(function, inputs)
    _check(fn, state, function, inputs)
    _check(fn, state, function, _leaves(rows, columns, seed + 1))


@given(programs(), st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3))
@settings(max_examples=15)  # each one compiles several times
def test_a_function_compiled_for_one_shape_equals_eager_at_others(program: Any, shapes: list[tuple[int, int]]) -> None:
    function = _function(program)
    state, fn = compiled(function, _leaves(2, 3, 0))
    for rows, columns in shapes:
        _check(fn, state, function, _leaves(rows, columns, rows))
    assert fn.cache_info().captures == len({(2, 3), *shapes})


@given(programs(), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=15)  # each one compiles several times
def test_both_captures_of_a_random_function_agree(program: Any, rows: int, columns: int) -> None:
    function, inputs = _function(program), _leaves(rows, columns, 0)
    outs = []
    for capture in ("dynamo", "trace"):
        state, fn = compiled(function, inputs, capture=capture)
        outs.append(_views(fn(state, *inputs)[1]))
    chex.assert_trees_all_equal(*outs)


@given(programs(), st.integers(1, 3), st.integers(0, 100))
@settings(max_examples=15)  # each one compiles several times
def test_value_and_grad_of_a_random_loss_equals_eager(program: Any, size: int, seed: int) -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return sum((one.square().sum() for one in tensors(_function(program)(x, y))), torch.zeros((), dtype=x.dtype))

    inputs = _leaves(size, 2, seed)
    state, fn = compiled(loss, inputs)
    _, (value, gradient) = sf.value_and_grad(fn)(state, *(one.detach() for one in inputs))
    expected = loss(*inputs)
    (theirs,) = torch.autograd.grad(expected, inputs[0], allow_unused=True, materialize_grads=True)
    chex.assert_trees_all_close(_views([value, gradient]), _views([expected, theirs]), rtol=1e-8, atol=1e-8)
