"""Compiles and backwards on several threads: each sees the options of its own engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch import Tensor

import scoped_fn as sf
from tests.helpers import assert_same, process_unchanged
from tests.lifecycles.engines import KINDS, TRAINERS, Regression, World, alone, batch, trainer
from tests.lifecycles.watching import Watching

pytestmark = pytest.mark.usefixtures("one_thread")
READ: dict[str, Callable[[], Any]] = {
    "torch._inductor.config.max_autotune": lambda: torch._inductor.config.max_autotune,
    "torch._inductor.config.realize_reads_threshold": lambda: torch._inductor.config.realize_reads_threshold,
    "torch._inductor.config.triton.unique_kernel_names": lambda: torch._inductor.config.triton.unique_kernel_names,
    "torch._functorch.config.max_dist_from_bw": lambda: torch._functorch.config.max_dist_from_bw,
    "torch._dynamo.config.recompile_limit": lambda: torch._dynamo.config.recompile_limit,
}


def in_effect() -> dict[str, Any]:
    return {key: read() for key, read in READ.items()}


def overrides(number: int) -> dict[str, Any]:
    """The overrides of an engine: another set of keys and other values for each."""
    every = {
        "torch._inductor.config.max_autotune": number % 2 == 0,
        "torch._inductor.config.realize_reads_threshold": 100 + number,
        "torch._inductor.config.triton.unique_kernel_names": number % 3 == 0,
        "torch._functorch.config.max_dist_from_bw": 2000 + number,
        "torch._dynamo.config.recompile_limit": 50 + number,
    }
    return {key: value for at, (key, value) in enumerate(every.items()) if at != number % 5}


def overridden(number: int, state: sf.CompilerState | None = None) -> tuple[sf.CompilerState, int]:
    state, owner = sf.acquire(sf.init_state() if state is None else state, f"engine {number}")
    for key, value in overrides(number).items():
        state = sf.set_override(state, owner, key, value)
    return state, owner


# 16
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_in_one_thread_and_backward_in_another_is_as_alone(kind: str) -> None:
    pool = ThreadPoolExecutor(1)
    with process_unchanged(), pool:
        one = pool.submit(trainer, kind).result()
        for number in range(3):
            one.forward(batch(number))
            pool.submit(one.backward).result()
            one.step()
    assert_same(one.outcome(), alone(kind, 0, range(3)))


# 16
@pytest.mark.parametrize("kind", ["autograd", "value_and_grad"])
def test_eight_engines_in_eight_threads_each_see_exactly_their_own_overrides(kind: str) -> None:
    start, defaults = threading.Barrier(8, timeout=60), in_effect()
    watching, models = [Watching(in_effect) for _ in range(8)], [Regression(seed) for seed in range(8)]

    def work(number: int) -> Any:
        world = World()
        world.state, owner = overridden(number)
        start.wait()
        one = TRAINERS[kind](world, models[number], backend=watching[number], owner=owner)
        for step in range(2):
            one.train(batch(step))
        outcome = one.outcome()
        one.evaluate(batch(9))
        assert in_effect() == defaults
        return outcome

    with process_unchanged(), ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(work, range(8)))
    for number, outcome in enumerate(outcomes):
        seen = watching[number].settings
        assert len(seen) == (4 if kind == "value_and_grad" else 3)
        assert seen == [{**defaults, **overrides(number)}] * len(seen)
        if number in (0, 1, 7):
            assert_same(outcome, alone(kind, number, range(2)), what=f"engine {number}")


# 16
def test_eight_engines_that_share_one_state_each_see_their_own() -> None:
    world, owners = World(), []
    for number in range(8):
        world.state, owner = overridden(number, world.state)
        owners.append(owner)
    shared, defaults, models = world.state, in_effect(), [Regression(seed) for seed in range(8)]
    for key in READ:
        assert len(shared.overrides[key]) == sum(key in overrides(number) for number in range(8))

    def work(number: int) -> list[Any]:
        watching = Watching(in_effect)
        one = TRAINERS["autograd"](World(shared), models[number], backend=watching, owner=owners[number])
        one.recompile(sf.Passes())
        assert dict(sf.overrides_of(one.world.state, one.fn)) == overrides(number)
        return watching.settings

    with process_unchanged(), ThreadPoolExecutor(8) as pool:
        for number, seen in enumerate(pool.map(work, range(8))):
            assert seen == [{**defaults, **overrides(number)}] * 4


def two(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ weight).tanh().sum(), (x @ weight.sin()).exp().sum()


# 16
@pytest.mark.parametrize("changed", [False, True], ids=["as compiled", "changed since"])
def test_a_backward_compiled_late_in_another_thread_has_the_overrides_of_its_forward(changed: bool) -> None:
    watching, (state, owner) = Watching(in_effect), overridden(3)
    expected = {**in_effect(), **overrides(3)}
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4)
    state, fn = sf.compile(state, two, (weight, x), backend=watching, owner=owner)
    if changed:
        state = sf.set_override(state, owner, "torch._functorch.config.max_dist_from_bw", 7)  # for what is new
    _, (first, _) = fn(state, weight, x)
    before = len(watching.settings)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(first.backward).result()
    assert watching.settings[before:] == [expected], "the loss uses one output of two: its backward is new"
    assert_same(weight.grad, torch.autograd.grad(two(weight, x)[0], weight)[0], rtol=1e-5, atol=1e-5)


# 16
def test_a_thread_of_somebody_else_never_sees_an_override() -> None:
    stop, defaults = threading.Event(), in_effect()

    def look() -> list[Any]:
        others = []
        while not stop.is_set():
            others += [now for now in [in_effect()] if now != defaults]
        return others

    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(look)
        try:
            for number in range(4):
                state, owner = overridden(number)
                with sf.effects(state, owner):
                    assert in_effect() == {**defaults, **overrides(number)}
                sf.compile(state, Regression(0), batch(0), backend="eager", owner=owner)
        finally:
            stop.set()
        assert seen.result() == []


# 16
def test_effects_in_eight_threads_at_once_hold_in_their_own_thread_and_end() -> None:
    together, defaults = threading.Barrier(8, timeout=60), in_effect()

    def work(number: int) -> tuple[Any, Any]:
        state, owner = overridden(number)
        with sf.effects(state, owner):
            together.wait()
            inside = in_effect()
            together.wait()
        return inside, in_effect()

    with process_unchanged(), ThreadPoolExecutor(8) as pool:
        for number, (inside, after) in enumerate(pool.map(work, range(8))):
            assert inside == {**defaults, **overrides(number)}
            assert after == defaults
