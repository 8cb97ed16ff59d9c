"""Calls of several kinds by one function: each is compiled once, and the state stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.helpers import assert_same
from tests.lifecycles.engines import KINDS, batch, plain_trainer, trainer
from tests.lifecycles.watching import Watching

pytestmark = pytest.mark.usefixtures("one_thread")


def without_counter(state: sf.CompilerState) -> Any:
    """The state, but for how many frames there have been: an engine opens one for each forward."""
    owners = {token: (one.name, one.generation, one.frames) for token, one in state.owners.items()}
    return owners, state.next_token, state.buffers, state.fp8, state.overrides, state.constants


# 2
@pytest.mark.parametrize("kind", KINDS)
def test_an_output_without_gradient_then_training_compiles_each_once(kind: str) -> None:
    watching = Watching()
    with torch.no_grad():
        one = plain_trainer(kind, watching)
        assert not one.loss_of(*batch(0)).requires_grad
    assert len(watching.graphs) == 1
    one.train(batch(0))
    trained = len(watching.graphs)
    assert trained == (2 if kind == "value_and_grad" else 3)
    for number in range(1, 6):
        assert not one.evaluate(batch(number)).requires_grad
        one.train(batch(number))
    assert len(watching.graphs) == trained
    assert one.fn.cache_info().compiled_graphs == trained


# 2
def test_parameters_that_want_no_gradient_then_some_that_do() -> None:
    watching = Watching()
    one = plain_trainer("autograd", watching)
    graphs = []
    for number in range(4):
        quiet = {name: own.detach() for name, own in one.params.items()}
        _, loss = one.fn(one.world.state, quiet, *batch(number))
        assert not loss.requires_grad
        one.train(batch(number))
        graphs.append(len(watching.graphs))
    assert graphs == [3] * 4
    assert one.fn.cache_info()[:2] == (2, 3)


# 3
@pytest.mark.parametrize("kind", KINDS)
def test_train_evaluate_and_train_four_more_is_one_pair_and_one_graph(kind: str) -> None:
    watching = Watching()
    one = plain_trainer(kind, watching)
    before = one.world.state
    one.train(batch(0))
    _ = one.evaluate(batch(1))
    for number in range(2, 6):
        one.train(batch(number))
    extra = 1 if kind == "value_and_grad" else 0
    assert len(watching.graphs) == 3 + extra
    assert one.fn.cache_info().compiled_graphs == 3 + extra
    assert one.fn.cache_info().eager_calls == 0
    assert without_counter(one.world.state) == without_counter(before)
    if kind != "engine":
        assert one.world.state is before


# 3
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_in_between_leaves_no_trace_in_the_training(kind: str) -> None:
    with_it, without = plain_trainer(kind, "eager"), plain_trainer(kind, "eager")
    for number in range(5):
        without.train(batch(number))
        with_it.train(batch(number))
        _ = with_it.evaluate(batch(100 + number))
    assert_same(with_it.outcome(), without.outcome())


# 4
@pytest.mark.parametrize("kind", KINDS)
def test_train_and_evaluation_in_turn_ten_times_make_two_variants(kind: str) -> None:
    watching = Watching()
    one = trainer(kind, backend=watching)
    counts = []
    for number in range(10):
        one.train(batch(number))
        _ = one.evaluate(batch(number))
        counts.append((one.fn.cache_info().captures, one.fn.cache_info().compiled_graphs, len(watching.graphs)))
    graphs = 4 if kind == "value_and_grad" else 3
    assert counts == [(counts[0][0], graphs, graphs)] * 10
    shown = repr(one.fn).split("variants: ")[1]
    assert (shown.count("training"), shown.count("inference")) == (1, 1)
    assert shown.count("value_and_grad") == (kind == "value_and_grad")


# 4
def test_an_engine_that_changes_its_mode_ten_times_has_two_functions() -> None:
    watching = Watching()
    one = trainer("engine", backend=watching)
    functions = []
    for number in range(10):
        one.engine.train()
        one.train(batch(number))
        functions.append(one.fn)
        one.engine.eval()
        _ = one.evaluate(batch(number))
        functions.append(one.fn)
    assert len({id(fn) for fn in functions}) == 2
    assert [fn.cache_info()[:2] for fn in functions[:2]] == [(1, 2), (1, 1)]
    assert len(watching.graphs) == 3
