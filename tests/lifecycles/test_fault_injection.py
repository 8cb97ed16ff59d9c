"""An exception at each point of a compile: it arrives as it is, and leaves nothing else behind."""

from __future__ import annotations

import pytest
import torch

import scoped_fn as sf
from tests.helpers import assert_same, fresh
from tests.lifecycles.traps import OVERRIDDEN, Scene, Trap, X, model, step

pytestmark = pytest.mark.usefixtures("one_thread")
LEVELS = ("captured", "joint", "partition", "saved", "forward", "backward")


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum()


@pytest.mark.parametrize("level", LEVELS)
def test_in_a_pass_of_a_first_compile(scene: Scene, error: BaseException, level: str) -> None:
    trap = Trap(error)
    state, owner = scene.new_owner()
    with scene.nothing_happens_but(error, state):
        sf.compile(state, model(5), (X,), backend="eager", owner=owner, passes=sf.Passes(**{level: trap}))
    assert trap.seen == [OVERRIDDEN]
    state, fn = sf.compile(state, model(5), (X,), backend="eager", owner=owner)
    assert fn.owner == owner, "the owner is as free as before"
    assert_same(step(state, fn), step(*scene.victim()))


@pytest.mark.parametrize("level", LEVELS)
def test_in_a_pass_of_a_recompile(scene: Scene, error: BaseException, level: str) -> None:
    state, fn = scene.victim()
    before, trap = step(state, fn), Trap(error)
    with scene.nothing_happens_but(error, state):
        sf.recompile(state, fn, sf.Passes(**{level: trap}))
    assert trap.seen == [OVERRIDDEN]
    assert_same(step(state, fn), before)
    state, again = sf.recompile(state, fn)
    assert state.owners[fn.owner].generation == 1
    assert_same(step(state, again), before)


@pytest.mark.parametrize("level", ["captured", "joint", "backward"])
def test_in_a_pass_when_a_schedule_advances(scene: Scene, error: BaseException, level: str) -> None:
    trap = Trap(error)
    schedule = sf.Schedule([(0, sf.Passes()), (3, sf.Passes(**{level: trap})), (5, sf.Passes())])
    state, fn = scene.victim(schedule=schedule)
    before = step(state, fn)
    with scene.nothing_happens_but(error, state):
        sf.advance(state, fn, 4)
    assert (trap.seen, fn.entry) == ([OVERRIDDEN], 0)
    state, later = sf.advance(state, fn, 5)
    assert (later.entry, fn.entry) == (2, 0)
    assert_same([step(state, fn), step(state, later)], [before, before])


@pytest.mark.parametrize("where", ["compile 1", "compile 2"])
def test_in_the_backend_at_a_first_compile(scene: Scene, error: BaseException, where: str) -> None:
    trap = Trap(error)
    with scene.nothing_happens_but(error):
        scene.victim(backend=trap.backend(where))
    assert trap.seen == [OVERRIDDEN]


@pytest.mark.parametrize("where", ["compile 3", "compile 4"])
def test_in_the_backend_at_a_later_variant(scene: Scene, error: BaseException, where: str) -> None:
    trap = Trap(error)
    state, fn = scene.victim(backend=trap.backend(where))
    before, counted = step(state, fn), fn.cache_info()
    with scene.nothing_happens_but(error, state):
        fn(state, fresh(fn.params), torch.ones(9, 3))
    assert trap.seen == [OVERRIDDEN]
    assert fn.cache_info().compiled_graphs <= counted.compiled_graphs + 1
    assert_same(step(state, fn), before)
    trap.is_set = False
    assert_same(step(state, fn, torch.ones(9, 3)), step(*scene.victim(), torch.ones(9, 3)))


def test_in_the_backend_of_a_whole_step(scene: Scene, error: BaseException) -> None:
    trap = Trap(error)
    state, owner = scene.new_owner()
    state, fn = sf.compile(state, sum_of_squares, (X,), owner=owner, backend=trap.backend("compile 2"))
    with scene.nothing_happens_but(error, state):
        sf.value_and_grad(fn)(state, X)
    assert trap.seen == [OVERRIDDEN]
    trap.is_set = False
    assert_same(sf.value_and_grad(fn)(state, X)[1], (X.square().sum(), 2 * X), rtol=1e-6, atol=1e-6)
