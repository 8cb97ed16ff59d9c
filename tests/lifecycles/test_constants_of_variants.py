"""Constants in variants of other kinds, in engines, and what `detect` finds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.helpers import assert_same, fresh
from tests.lifecycles.engines import KINDS, batch, trainer
from tests.lifecycles.graphs import times
from tests.lifecycles.test_constants_in_code import PLAIN, X, made, scaled, tuned, value, with_factor
from tests.lifecycles.watching import Watching

pytestmark = pytest.mark.usefixtures("one_thread")


def test_variants_of_value_and_grad_follow_a_constant_and_go_back() -> None:
    state, fn = made(with_factor(2.0), sf.Passes(captured=scaled))
    changed, step = sf.set_constant(state, "factor", 6.0), sf.value_and_grad(fn)
    found, graphs = [], []
    for one in (state, changed, state, changed):
        found.append(step(one, X)[1])
        graphs.append(fn.cache_info().compiled_graphs)
    assert graphs[0] == 3
    assert graphs == [3, 4, 4, 4], "one graph more for the other value, none for going back"
    assert_same(found[2:], found[:2])
    assert_same([found[1][0] / 3, found[1][1] / 3], [found[0][0], found[0][1]], rtol=1e-6)


def test_inference_and_other_shapes_follow_a_constant_too() -> None:
    state, fn = made(with_factor(2.0), sf.Passes(captured=scaled))
    changed = sf.set_constant(state, "factor", 8.0)
    longer = torch.cat([X, X])
    with torch.no_grad():
        for _ in range(2):
            values = [fn(one, x)[1] for one in (state, changed) for x in (X, longer)]
            captures = fn.cache_info().captures
    assert captures == 1 + 4
    expected = torch.tensor([2 * PLAIN, 4 * PLAIN, 8 * PLAIN, 16 * PLAIN])
    assert_same(torch.stack(values), expected, rtol=1e-5)


def test_a_loss_that_waits_over_a_change_has_its_own_backward() -> None:
    state, fn = made(with_factor(2.0), sf.Passes(captured=scaled))
    x, other = fresh(X).requires_grad_(), fresh(X).requires_grad_()
    _, waiting = fn(state, x)
    fn(sf.set_constant(state, "factor", 5.0), other)[1].backward()
    waiting.backward()
    assert x.grad is not None
    assert other.grad is not None
    assert_same(x.grad / 2, other.grad / 5, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_whose_constant_changes_compiles_again_at_its_next_call(kind: str) -> None:
    watching = Watching()
    one = trainer(kind, backend=watching, passes=sf.Passes(captured=tuned))
    one.train(batch(0))
    graphs = len(watching.graphs)
    one.world.state = sf.set_constant(one.world.state, "irrelevant", 1)
    one.train(batch(1))
    assert len(watching.graphs) == graphs
    one.world.state = sf.set_constant(one.world.state, "fast", True)
    before = one.evaluate(batch(2))
    one.train(batch(2))
    assert len(watching.graphs) > graphs
    assert_same(one.losses[-1], before)
    assert one.fn.constants["fast"] in (True, sf.ABSENT)


def test_equal_values_of_other_types_are_other_values() -> None:
    @sf.passes.reads_constants
    def whole(gm: torch.fx.GraphModule, constants: Any) -> torch.fx.GraphModule:
        return times({bool: 5.0, int: 7.0, float: 9.0}[type(constants["one"])], gm)

    state = sf.set_constant(sf.init_state(), "one", 1)
    state, fn = made(state, sf.Passes(captured=whole))
    for one, factor in ((1, 7), (True, 5), (1.0, 9), (1, 7)):
        assert value(sf.set_constant(state, "one", one), fn) == pytest.approx(factor * PLAIN)
    assert fn.cache_info().captures == 3


def test_zeros_of_two_signs_are_two_values_and_nan_is_one() -> None:
    @sf.passes.reads_constants
    def whole(gm: torch.fx.GraphModule, constants: Any) -> torch.fx.GraphModule:
        return times(math.copysign(5.0, constants["zero"]), gm)

    state = sf.set_constant(sf.init_state(), "zero", 0.0)
    state, fn = made(state, sf.Passes(captured=whole))
    for zero, factor in ((-0.0, -5), (0.0, 5), (float("nan"), 5), (float("nan"), 5)):
        assert value(sf.set_constant(state, "zero", zero), fn) == pytest.approx(factor * PLAIN)
    assert fn.cache_info().captures == 3


def test_what_a_later_variant_read_is_checked_for_that_variant() -> None:
    @sf.passes.reads_constants
    def later(gm: torch.fx.GraphModule, constants: Any) -> torch.fx.GraphModule:
        return times(constants["late"], gm) if torch.is_grad_enabled() else gm

    state = sf.set_constant(sf.init_state(), "late", 2.0)
    with torch.no_grad():
        state, fn = made(state, sf.Passes(captured=later))
        assert fn.constants == {}
    assert value(state, fn) == pytest.approx(2 * PLAIN)
    changed, captures = sf.set_constant(state, "late", 3.0), fn.cache_info().captures
    with torch.no_grad():
        assert float(fn(changed, X)[1]) == pytest.approx(PLAIN)
    assert fn.cache_info().captures == captures
    assert value(changed, fn) == pytest.approx(3 * PLAIN)


DETECTED = {"torch.version", "triton.version", "cuda.version", "cuda.capability", "cublaslt.version"}


def test_detect_fills_what_is_not_set_and_twice_is_once() -> None:
    state = sf.detect(sf.init_state())
    assert set(state.constants) == DETECTED
    assert state.constants["torch.version"] == torch.__version__
    assert (state.constants["cuda.capability"] is None) == (not torch.cuda.is_available())
    assert sf.detect(state) is state
    replaced = sf.set_constant(sf.init_state(), "cuda.capability", (10, 0))
    assert sf.detect(replaced).constants["cuda.capability"] == (10, 0)


def test_what_would_be_done_on_another_gpu() -> None:
    state, fn = made(sf.detect(sf.init_state()), sf.Passes(captured=tuned))
    here = value(state, fn)
    there = {
        capability: value(sf.set_constant(state, "cuda.capability", capability), fn) for capability in [(9, 0), (10, 0)]
    }
    assert there[10, 0] == pytest.approx(2 * PLAIN)
    assert there[9, 0] == pytest.approx(PLAIN)
    assert here in (pytest.approx(PLAIN), pytest.approx(2 * PLAIN))
    assert fn.constants["cuda.capability"] == state.constants["cuda.capability"]
