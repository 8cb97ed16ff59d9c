"""Losses that wait for their backward, or never get one."""

from __future__ import annotations

import pytest
import torch

import scoped_fn as sf
from tests.helpers import assert_same
from tests.lifecycles.engines import (
    KINDS,
    World,
    alone,
    assert_as_alone,
    batch,
    plain_trainer,
    trainer,
)
from tests.lifecycles.graphs import sine_pass
from tests.lifecycles.watching import Watching, is_original, no_collection

pytestmark = pytest.mark.usefixtures("one_thread")
WAITING = ("autograd", "engine")


# 1
@pytest.mark.parametrize("waits", WAITING)
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_while_a_loss_of_another_waits_keep_nothing_and_compile_nothing(kind: str, waits: str) -> None:
    world, watching = World(), Watching()
    waiting = trainer(waits, 1, world)
    waiting.forward(batch(0))
    training = trainer(kind, 0, world, backend=watching)
    runs = list[int]()
    with no_collection():
        for number in range(50):
            assert watching.alive(sum(runs[:-1])) == [], "what step k saved is dead before step k + 2"
            before = len(watching.results)
            training.train(batch(number))
            runs.append(len(watching.results) - before)
            assert is_original()
    assert runs == [1 if kind == "value_and_grad" else 2] * 50
    assert len(watching.graphs) == (3 if kind == "value_and_grad" else 2), "each backward compiled once"
    assert watching.originals == [True] * len(watching.originals)
    waiting.backward()
    waiting.step()
    assert_as_alone(waiting, waits, 1, [0])
    assert_as_alone(training, kind, 0, range(50))


# 1
def test_a_waiting_loss_keeps_what_its_own_backward_needs_and_no_more() -> None:
    watching = Watching()
    one = plain_trainer("autograd", watching)
    one.forward(batch(0))
    with no_collection():
        held = len(watching.alive(1))
        for number in range(1, 5):
            one.loss_of(*batch(number))
            assert len(watching.alive(number + 1)) == held, "a forward that nobody waits for frees what it saved"
        one.pending = None
        assert watching.alive(1) == []
    assert held > 1


# 1
def test_two_losses_of_one_engine_wait_and_come_in_reverse() -> None:
    expected = []
    for number in (0, 1):
        one = trainer("engine")
        one.train(batch(number))
        expected.append(one.losses[0])
    one = trainer("engine")
    losses = [one.loss_of(*batch(number)) for number in (0, 1)]
    frames = one.world.state.owners[one.fn.owner].frames
    assert len(set(frames)) == 2
    for left, loss in zip((1, 0), reversed(losses), strict=True):
        loss.backward()  # type: ignore[no-untyped-call]
        assert len(one.world.state.owners[one.fn.owner].frames) == left
    assert_same([loss.detach() for loss in losses], expected)


# 7
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("kind", WAITING)
def test_a_recompile_while_losses_of_both_wait_leaves_both_backwards_right(kind: str, backend: str) -> None:
    world = World()
    options = {"backend": backend}
    first, second = trainer(kind, 0, world, **options), trainer(kind, 1, world, **options)
    first.forward(batch(0))
    second.forward(batch(1))
    first.recompile(sf.Passes())
    for one in (second, first):
        one.backward()
        one.step()
        one.train(batch(2))
    assert_as_alone(second, kind, 1, [1, 2], **options)
    assert_as_alone(first, kind, 0, [0, 2], **options)


# 7
@pytest.mark.parametrize("kind", WAITING)
def test_a_pending_backward_is_that_of_the_code_that_ran_the_forward(kind: str) -> None:
    one, other = trainer(kind), alone(kind, 0, [0])
    one.forward(batch(0))
    one.recompile(sf.Passes(captured=sine_pass))
    one.backward()
    one.step()
    assert_same(one.outcome(), other, what="the old code's backward")
    one.train(batch(1))
    assert not torch.equal(one.losses[1], alone(kind, 0, [0, 1])[0][1]), "the new code has the new passes"


# 7
@pytest.mark.parametrize("kind", KINDS)
def test_the_old_function_goes_on_with_the_old_and_the_new_state(kind: str) -> None:
    one = trainer(kind)
    old_state, old_fn = one.world.state, one.fn
    x, y = batch(0)
    _, before = old_fn(old_state, one.params, x, y)
    one.recompile(sf.Passes())
    assert one.fn is not old_fn
    assert one.fn.owner == old_fn.owner
    assert one.world.state.owners[one.fn.owner].generation == 1
    assert old_state.owners[one.fn.owner].generation == 0
    for state in (old_state, one.world.state):
        assert_same(old_fn(state, one.params, x, y)[1].detach(), before.detach())
        assert_same(one.fn(state, one.params, x, y)[1].detach(), before.detach())
