"""Release of one engine at every point of another one's life."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import scoped_fn as sf
from tests.helpers import assert_same, fresh
from tests.lifecycles.engines import RATE, Regression, World, alone, assert_as_alone, batch, merges, trainer

pytestmark = pytest.mark.usefixtures("one_thread")
A_LIVES = [
    ("a release",),
    ("a forward", "a release"),
    ("a forward", "a release", "a backward"),
    ("a forward", "a backward", "a release"),
]
B_LIFE = ("b forward", "b backward", "b step", "b forward", "b backward", "b step")
ORDERS = [order for life in A_LIVES for order in merges(life, B_LIFE)]


class Life:
    """A compiled function in training, from a state that is a value, so that each order starts anew for nothing."""

    def __init__(self, fn: sf.CompiledFn) -> None:
        self.fn, self.params, self.losses = fn, fresh(fn.params), list[Tensor]()
        self.wholly = sf.value_and_grad(fn)

    def forward(self, state: sf.CompilerState) -> sf.CompilerState:
        state, self.loss = self.fn(state, self.params, *batch(len(self.losses)))
        self.losses.append(self.loss.detach())
        return state

    def backward(self, state: sf.CompilerState) -> sf.CompilerState:
        self.loss.backward()
        return state

    def step(self, state: sf.CompilerState) -> sf.CompilerState:
        for own in self.params.values():
            assert own.grad is not None
            own.data.add_(own.grad, alpha=-RATE)
            own.grad = None
        return state

    def whole(self, state: sf.CompilerState) -> sf.CompilerState:
        state, (loss, grads) = self.wholly(state, self.params, *batch(len(self.losses)))
        self.losses.append(loss)
        self.params = {name: own - RATE * grads[name] for name, own in self.params.items()}
        return state

    def release(self, state: sf.CompilerState) -> sf.CompilerState:
        return sf.release(state, self.fn)

    def outcome(self, state: sf.CompilerState) -> Any:
        params = {name: own.detach() for name, own in self.params.items()}
        return self.losses, params, dict(state.buffers[self.fn.owner])


def two(first: int = 0) -> tuple[sf.CompilerState, list[sf.CompiledFn]]:
    """A state with A and B, compiled in either order."""
    state, made = sf.init_state(), dict[int, sf.CompiledFn]()
    for seed in (first, 1 - first):
        state, made[seed] = sf.compile(state, Regression(seed), batch(0), backend="eager")
    return state, [made[0], made[1]]


# 6
@pytest.mark.parametrize("first", [0, 1], ids=["a compiled first", "b compiled first"])
def test_a_released_in_every_order_relative_to_b_leaves_b_as_alone(first: int) -> None:
    start, functions = two(first)
    expected = alone("autograd", 1, [0, 1])
    assert len(set(ORDERS)) == 7 + 28 + 84 + 84
    for order in ORDERS:
        state, lives = start, dict(zip("ab", map(Life, functions), strict=True))
        for name, move in (entry.split() for entry in order):
            state = getattr(lives[name], move)(state)
        assert list(state.owners) == [functions[1].owner]
        assert_same(lives["b"].outcome(state), expected, what=", ".join(order))


# 6
def test_a_released_in_every_order_relative_to_whole_steps_of_b_leaves_b_as_alone() -> None:
    start, functions = two()
    expected = alone("value_and_grad", 1, [0, 1])
    for order in [order for life in A_LIVES for order in merges(life, ("b whole", "b whole"))]:
        state, lives = start, dict(zip("ab", map(Life, functions), strict=True))
        for name, move in (entry.split() for entry in order):
            state = getattr(lives[name], move)(state)
        assert_same(lives["b"].outcome(state), expected, what=", ".join(order))


# 6
@pytest.mark.parametrize("order", list(merges(("a compile", "a release"), ("b compile", "b forward", "b backward"))))
def test_a_compiled_and_released_around_b_leaves_b_as_alone(order: tuple[str, ...]) -> None:
    state, lives = sf.init_state(), dict[str, Life]()
    for name, move in (entry.split() for entry in order):
        if move == "compile":
            state, fn = sf.compile(state, Regression("ab".index(name)), batch(0), backend="eager")
            lives[name] = Life(fn)
        else:
            state = getattr(lives[name], move)(state)
    state = lives["b"].step(state)
    assert_same(lives["b"].outcome(state), alone("autograd", 1, [0]))


# 6
@pytest.mark.parametrize(
    ("kind", "moment"), [*(("engine", at) for at in range(7)), ("autograd", 2), ("value_and_grad", 3)]
)
def test_a_dropped_engine_leaves_another_as_alone(kind: str, moment: int) -> None:
    world = World()
    dropped, kept = [trainer("engine", 0, world)], trainer(kind, 1, world)
    dropped[0].forward(batch(0))
    for number in range(6):
        if number == moment:
            dropped[0].release()
            dropped.clear()
        getattr(kept, B_LIFE[number].split()[1])(*([batch(number // 3)] if number % 3 == 0 else []))
    assert_as_alone(kept, kind, 1, [0, 1])


# 6
def test_a_release_drops_what_is_of_a_and_nothing_of_b() -> None:
    start, (a, b) = two()
    start, _ = a(start, a.params, *batch(0))
    start, _ = b(start, b.params, *batch(1))
    released = sf.release(start, a)
    for field in (released.buffers, released.owners):
        assert a.owner not in field
        assert b.owner in field
    assert_same(dict(released.buffers[b.owner]), dict(start.buffers[b.owner]))
    assert all(released.buffers[b.owner][name] is own for name, own in start.buffers[b.owner].items())
    with pytest.raises(sf.OwnershipError, match=r"Expected .*owner 0.*, got .*released"):
        sf.release(released, a)
    with pytest.raises(sf.OwnershipError, match="released"):
        a(released, a.params, *batch(0))
    empty = sf.release(released, b)
    assert (dict(empty.owners), dict(empty.buffers), empty.next_token) == ({}, {}, 2)
    assert torch.equal(start.key, empty.key)
