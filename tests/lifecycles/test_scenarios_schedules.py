"""Schedules: which passes are in force at which step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.lifecycles.engines import KINDS, World, batch, trainer
from tests.lifecycles.graphs import sine_pass

pytestmark = pytest.mark.usefixtures("one_thread")
LEVELS = ("captured", "joint", "forward", "backward")
Log = list[tuple[str, str, str]]


def logging(log: Log, engine: str, entry: str) -> sf.Passes:
    """Passes that change nothing and write down that they ran, and on what."""

    def at(level: str) -> Callable[[torch.fx.GraphModule], torch.fx.GraphModule]:
        def write(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
            log.append((f"{engine} {entry}", level, gm.code))
            return gm

        return write

    options: Any = {level: at(level) for level in LEVELS}
    return sf.Passes(**options)


def ran(log: Log) -> list[str]:
    return [f"{who} {level}" for who, level, _ in log]


def entry(who: str) -> list[str]:
    return [f"{who} {level}" for level in LEVELS]


# 8
@pytest.mark.parametrize("kind", ["autograd", "engine"])
def test_each_engine_runs_exactly_the_passes_of_its_schedule(kind: str) -> None:
    log, world = Log(), World()
    switches = {"a": 3, "b": 2}
    engines = {
        name: trainer(
            kind, 0, world, schedule=sf.Schedule([(0, logging(log, name, "p0")), (at, logging(log, name, "p1"))])
        )
        for name, at in switches.items()
    }
    assert ran(log) == entry("a p0") + entry("b p0")
    expected = {2: entry("b p1"), 3: entry("a p1")}
    for number in range(6):
        log.clear()
        for one in engines.values():
            one.advance(number)
            one.train(batch(number))
        assert ran(log) == expected.get(number, []), f"step {number}"
    assert [one.fn.entry for one in engines.values()] == [1, 1]


# 8
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_compile_starts_from_the_same_captured_graph(kind: str) -> None:
    log = Log()
    both = [sf.Passes(captured=sine_pass), logging(log, "a", "p1")]
    one = trainer(kind, schedule=sf.Schedule([(0, logging(log, "a", "p0")), (1, both[0]), (3, both[1])]))
    one.train(batch(0))
    pristine, text = one.fn.pristine, str(one.fn.pristine)
    first = [code for _, level, code in log if level == "captured"]
    log.clear()
    for number in range(1, 4):
        one.advance(number)
        one.train(batch(number))
        assert one.fn.pristine is pristine
    assert str(pristine) == text
    again = [code for _, level, code in log if level == "captured"]
    assert set(again) == set(first), "passes are applied to the captured graph again, never to their own results"
    assert {who for who, _, _ in log} == {"a p1"}


# 8
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_compiled_where_the_entry_stays(kind: str) -> None:
    one = trainer(kind, schedule=sf.Schedule([(2, sf.Passes(captured=sine_pass))]))
    entries = []
    for number in range(5):
        state, fn = one.world.state, one.fn
        one.advance(number)
        assert (one.fn is fn) == (number != 2)
        assert (one.world.state is state) == (number != 2)
        entries.append(one.fn.entry)
    assert entries == [None, None, 0, 0, 0]
    one.advance(1)
    assert one.fn.entry is None, "the schedule is data: it can be read backwards too"


# 17
@pytest.mark.parametrize(("step", "name"), [(0, "p0"), (49, "p0"), (50, "p1"), (100, "p1")])
def test_a_compile_that_begins_at_a_step_runs_only_what_is_due_there(step: int, name: str) -> None:
    log = Log()
    schedule = sf.Schedule([(0, logging(log, "a", "p0")), (50, logging(log, "a", "p1"))])
    one = trainer("autograd", schedule=schedule, step=step)
    assert ran(log) == entry(f"a {name}")
    state, fn = one.world.state, one.fn
    one.advance(step)
    assert (one.world.state is state, one.fn is fn) == (True, True)
    assert one.world.state.owners[one.fn.owner].entry == one.fn.entry == int(name == "p1")
