"""A pass that raises, wherever it stands: the exception arrives, and nothing else happened."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.helpers import process_unchanged
from tests.lifecycles.engines import KINDS, Regression, World, alone, assert_as_alone, batch, trainer
from tests.lifecycles.graphs import passes_at
from tests.lifecycles.watching import Watching, is_original

pytestmark = pytest.mark.usefixtures("one_thread")
LEVELS = ("captured", "joint", "partition", "saved", "forward", "backward")


class PassError(Exception):
    """What the user's own pass raises."""


def failing(level: str) -> tuple[sf.Passes, PassError]:
    """Passes of which one raises, and what it raises."""
    error = PassError(level)

    def raises(*_: Any) -> Any:
        raise error

    return passes_at(level, raises), error


# 9
@pytest.mark.parametrize("way", ["autograd", "engine"])
def test_a_pass_that_raises_in_a_first_compile(way: str) -> None:
    world = World()
    other = trainer("autograd", 1, world)
    state = world.state
    other.forward(batch(0))
    for level in LEVELS:
        passes, error = failing(level)
        with process_unchanged(), pytest.raises(PassError) as caught:
            trainer(way, world=World(state), passes=passes)
        assert caught.value is error
        assert is_original()
    other.backward()
    other.step()
    assert_as_alone(other, "autograd", 1, [0])
    assert list(state.owners) == [other.fn.owner]


# 9
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_raises_in_a_recompile_leaves_the_old_function_at_work(kind: str) -> None:
    one = trainer(kind)
    one.forward(batch(0))
    state, fn = one.world.state, one.fn
    for level in LEVELS:
        passes, error = failing(level)
        with process_unchanged(), pytest.raises(PassError) as caught:
            one.recompile(passes)
        assert caught.value is error
        assert is_original()
        assert (one.world.state is state, one.fn is fn) == (True, True)
    one.backward()
    one.step()
    one.train(batch(1))
    assert_as_alone(one, kind, 0, [0, 1])


# 9
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_raises_when_a_schedule_advances(kind: str) -> None:
    made = [failing(level) for level in LEVELS]
    entries = [sf.Passes(), *(passes for passes, _ in made), sf.Passes()]
    one = trainer(kind, schedule=sf.Schedule(list(enumerate(entries))))
    one.train(batch(0))
    for number, (_, error) in enumerate(made, start=1):
        with process_unchanged(), pytest.raises(PassError) as caught:
            one.advance(number)
        assert caught.value is error
        assert one.fn.entry == 0
        one.train(batch(number))
    one.advance(7)
    one.train(batch(7))
    assert one.fn.entry == 7
    assert_as_alone(one, kind, 0, range(8))


class WhereWanted:
    """A pass that does nothing where no gradient is wanted, and then does what another one does."""

    def __init__(self, then: Any) -> None:
        self.then = then

    def __call__(self, *given: Any) -> Any:
        if torch.is_grad_enabled():
            return self.then(*given)
        return given[0]


# 9
@pytest.mark.parametrize("level", ["joint", "partition", "saved", "forward", "backward"])
def test_a_pass_that_raises_in_a_later_variant(level: str) -> None:
    passes, error = failing(level)
    with torch.no_grad():  # an inference graph runs the forward pass alone: it must not raise yet
        quiet = passes_at(level, WhereWanted(getattr(passes, level)))
        state, fn = sf.compile(sf.init_state(), Regression(0), batch(0), backend="eager", passes=quiet)
    before = fn.cache_info()
    for call in (fn, sf.value_and_grad(fn)):
        with process_unchanged(), pytest.raises(PassError) as caught:
            call(state, fn.params, *batch(0))
        assert caught.value is error
    assert fn.cache_info().compiled_graphs == before.compiled_graphs
    with torch.no_grad():
        assert torch.equal(fn(state, fn.params, *batch(0))[1], alone("autograd", 0, [0])[0][0])


# 9
@pytest.mark.parametrize("where", ["compile", "run"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_that_raises(kind: str, where: str) -> None:
    error = PassError(where)
    broken = [False]

    class Breaking(Watching):
        def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
            if broken[0] and where == "compile":
                raise error
            run = super().__call__(gm, example_inputs)

            def runs(*tensors: torch.Tensor) -> Any:
                if broken[0]:
                    raise error
                return run(*tensors)

            return runs

    one = trainer(kind, backend=Breaking())
    one.train(batch(0))
    broken[0] = True
    state, fn = one.world.state, one.fn
    act = partial(one.recompile, sf.Passes()) if where == "compile" else partial(one.forward, batch(1))
    with process_unchanged(), pytest.raises(PassError) as caught:
        act()
    assert caught.value is error
    broken[0] = False
    assert (one.world.state is state, one.fn is fn) == (True, True)
    one.train(batch(1))
    assert_as_alone(one, kind, 0, [0, 1])
