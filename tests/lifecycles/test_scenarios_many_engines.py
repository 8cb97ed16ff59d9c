"""Many engines in one process: none sees another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import scoped_fn as sf
from tests.helpers import assert_same
from tests.lifecycles.engines import (
    KINDS,
    TRAINERS,
    Regression,
    Trainer,
    World,
    alone,
    batch,
    merges,
    sgd,
    trainer,
)
from tests.lifecycles.watching import Watching

pytestmark = pytest.mark.usefixtures("one_thread")


def partly_frozen(seed: int, frozen: str) -> Regression:
    """A regression of which no parameter, the first layer or all is frozen."""
    model = Regression(seed)
    for name, one in model.named_parameters():
        one.requires_grad_(not (frozen == "all" or (frozen == "first" and name.startswith("net.0."))))
    return model


def frozen_part(number: int) -> str:
    return {4: "first", 9: "all"}.get(number, "none")


def trained_alone(kind: str, seed: int, steps: int) -> Any:
    one = TRAINERS[kind](World(), partly_frozen(seed, frozen_part(seed)))
    for number in range(steps):
        one.train(batch(number))
    return one.outcome()


# 5
@pytest.mark.parametrize("kind", KINDS)
def test_twelve_engines_of_one_class_two_of_them_frozen_are_each_as_alone(kind: str) -> None:
    world, watching = World(), [Watching() for _ in range(12)]
    engines = [
        TRAINERS[kind](world, partly_frozen(seed, frozen_part(seed)), backend=watching[seed]) for seed in range(12)
    ]
    for number in range(4):
        for seed, one in enumerate(engines):
            if number < 1 + seed % 4:
                one.train(batch(number))
    for seed, one in enumerate(engines):
        steps = 1 + seed % 4
        info, graphs, calls = one.fn.cache_info(), len(watching[seed].graphs), len(watching[seed].results)
        assert (info.compiled_graphs, info.compiled_calls, info.eager_calls) == (graphs, calls, 0)
        pair = 1 if frozen_part(seed) == "all" else 2
        assert (graphs, calls) == ((pair + 1, steps) if kind == "value_and_grad" else (pair, pair * steps))
        if kind == "autograd" or seed in (0, 4, 9, 11):
            assert_same(one.outcome(), trained_alone(kind, seed, steps), what=f"engine {seed}")


MOVES = ("forward", "backward", "step")


def run(order: tuple[str, ...], engines: dict[str, Trainer]) -> None:
    for name, move in (entry.split() for entry in order):
        one = engines[name]
        if move == "forward":
            one.forward(batch(0))
        else:
            getattr(one, move)()


# 11
@pytest.mark.parametrize(("first", "second"), [(a, b) for a in KINDS for b in KINDS if a <= b])
def test_forward_backward_and_step_of_two_in_all_orders_are_as_sequential(first: str, second: str) -> None:
    orders = list(merges([f"a {move}" for move in MOVES], [f"b {move}" for move in MOVES]))
    assert len(set(orders)) == 20
    kinds, world = {"a": (first, 0), "b": (second, 1)}, World()
    expected = {name: alone(kind, seed, [0]) for name, (kind, seed) in kinds.items()}
    made = {name: trainer(kind, seed, world) for name, (kind, seed) in kinds.items()}
    start = {name: rewind_point(one) for name, one in made.items()}
    for order in orders:
        for name, one in made.items():
            rewind(one, start[name])
        run(order, made)
        for name, one in made.items():
            assert_same(one.outcome(), expected[name], what=f"{name} in {', '.join(order)}")


def rewind_point(one: Trainer) -> Any:
    return copy.deepcopy({name: own.detach() for name, own in one.params.items()}), one.buffers()


def rewind(one: Trainer, start: Any) -> None:
    """Back to the start, without a compile: the state is a value."""
    params, buffers = start
    if hasattr(one, "engine"):
        for name, own in one.engine.model.named_buffers():
            own.copy_(buffers[name])
    one.params = (
        one.params if hasattr(one, "engine") else {n: own.clone().requires_grad_() for n, own in params.items()}
    )
    with torch.no_grad():
        for name, own in one.params.items():
            own.copy_(params[name])
    one.optimizer = sgd(one.params.values())
    one.world.state = sf.set_buffers(one.world.state, one.fn.owner, buffers)
    one.losses = []


# 12
@pytest.mark.parametrize(("kind", "backend"), [*((kind, "eager") for kind in KINDS), ("value_and_grad", "inductor")])
def test_frozen_and_trainable_parameters_for_ten_steps_equal_eager(kind: str, backend: str) -> None:
    model = partly_frozen(0, "first")
    twin = copy.deepcopy(model)
    one, optimizer, losses = TRAINERS[kind](World(), model, backend=backend), sgd(twin.parameters()), list[Tensor]()
    for number in range(10):
        one.forward(batch(number))
        one.backward()
        assert frozen_gradients(one) == {"net.0.weight": None, "net.0.bias": None}
        one.step()
        loss = twin(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    expected = losses, {name: own.detach() for name, own in twin.named_parameters()}, dict(twin.named_buffers())
    assert_same(one.outcome(), expected, rtol=1e-4, atol=1e-6)


def frozen_gradients(one: Trainer) -> dict[str, Tensor | None]:
    """The gradients of frozen parameters; zeros, which `value_and_grad` gives, count as none."""
    grads = {name: one.grads[name] if hasattr(one, "grads") else own.grad for name, own in one.params.items()}
    frozen = {name: grads[name] for name in grads if name.startswith("net.0.")}
    return {name: None if grad is None or not grad.any() else grad for name, grad in frozen.items()}
