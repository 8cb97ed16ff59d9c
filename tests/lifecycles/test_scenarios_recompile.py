"""Recompiles with queued inputs, and with none left."""

from __future__ import annotations

from functools import partial

import pytest

import scoped_fn as sf
from tests.helpers import assert_same
from tests.lifecycles.engines import KINDS, Trainer, assert_as_alone, batch, plain_trainer, trainer
from tests.lifecycles.graphs import sine_pass, times
from tests.lifecycles.watching import Watching

pytestmark = pytest.mark.usefixtures("one_thread")


def emptied(one: Trainer) -> None:
    """Queues the inputs of two batches and takes them out again: their spec is left."""
    for number in range(2):
        one.world.state = sf.push_inputs(one.world.state, one.fn, batch(number))
    for number in range(2):
        one.world.state, taken = sf.take_inputs(one.world.state, one.fn)
        assert_same(taken, batch(number))


# 10
@pytest.mark.parametrize("kind", KINDS)
def test_a_recompile_with_no_inputs_left_works_from_the_spec(kind: str) -> None:
    one, numbers = trainer(kind), [0, 1, 2]
    emptied(one)
    one.train(batch(0))
    one.recompile(sf.passes.memory_budget(0.5))
    for number in numbers[1:]:
        one.train(batch(number))
    assert_as_alone(one, kind, 0, numbers)
    assert one.world.state.owners[one.fn.owner].generation == 1


# 10
@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_with_no_inputs_left_is_synthetic_and_one_with_inputs_is_not(kind: str) -> None:
    one = trainer(kind)
    one.world.state, never = sf.profile(one.world.state, one.fn)
    emptied(one)
    one.world.state, none_left = sf.profile(one.world.state, one.fn)
    one.world.state = sf.push_inputs(one.world.state, one.fn, batch(3))
    one.world.state, with_inputs = sf.profile(one.world.state, one.fn)
    assert (never.synthetic, none_left.synthetic, with_inputs.synthetic) == (True, True, False)
    assert (never.complete, none_left.complete, with_inputs.complete) == (True, True, True)
    _, spec = sf.take_inputs(one.world.state, one.fn)
    assert isinstance(spec, sf.InputSpec), "the profile took what was queued"


# 10
def test_an_engine_profiles_what_was_queued_and_then_what_it_makes_up() -> None:
    one = trainer("engine")
    one.world.state = sf.push_inputs(one.world.state, one.fn, batch(0))
    assert not one.engine.profile().synthetic
    assert one.engine.profile().synthetic
    one.train(batch(0))
    assert_as_alone(one, "engine", 0, [0])


# 7, 10
@pytest.mark.parametrize("kind", KINDS)
def test_passes_are_applied_again_and_never_add_up(kind: str) -> None:
    one = trainer(kind)
    once = one.loss_of(*batch(0)).detach()
    one.recompile(sf.Passes(captured=partial(times, 2.0)))
    for _ in range(2):
        one.recompile(None)
        assert_same(one.loss_of(*batch(0)).detach(), 2 * once, rtol=1e-6)
    assert one.world.state.owners[one.fn.owner].generation == 3
    one.recompile(sf.Passes())
    assert_same(one.loss_of(*batch(0)).detach(), once)


# 7
@pytest.mark.parametrize("kind", KINDS)
def test_the_old_function_compiles_nothing_after_a_recompile(kind: str) -> None:
    watching = Watching()
    one = plain_trainer(kind, watching)
    one.train(batch(0))
    old, old_state = one.fn, one.world.state
    info, graphs = old.cache_info(), len(watching.graphs)
    one.recompile(sf.Passes(captured=sine_pass))
    one.train(batch(1))
    assert old.cache_info() == info
    assert len(watching.graphs) > graphs
    graphs = len(watching.graphs)
    old(old_state, {name: own.detach().requires_grad_() for name, own in one.params.items()}, *batch(0))[1].backward()
    assert old.cache_info().compiled_calls == info.compiled_calls + 2
    assert old.cache_info().compiled_graphs == len(watching.graphs) - graphs + info.compiled_graphs


# 7
def test_a_release_after_a_recompile_is_that_of_both_functions() -> None:
    one = trainer("autograd")
    old = one.fn
    one.recompile(sf.Passes())
    one.release()
    for fn in (old, one.fn):
        with pytest.raises(sf.OwnershipError, match="released"):
            fn(one.world.state, one.params, *batch(0))
        with pytest.raises(sf.OwnershipError, match="released"):
            sf.recompile(one.world.state, fn)
