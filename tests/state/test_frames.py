"""Frames: each is closed once, by its owner, and the last one takes with it what was queued for its backward."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.generators.arrays import kept
from tests.state.whole import owners, whole_state


def test_indices_of_an_owner_never_repeat() -> None:
    state, first, second = owners("a", "b")
    seen = []
    for _ in range(3):
        state, frame = sf.open_frame(state, first)
        seen.append(frame)
        state = sf.close_frame(state, frame)
    assert len(set(seen)) == 3
    state, other = sf.open_frame(state, second)
    assert state.owners[first].frames == ()
    assert state.owners[second].frames == (other.index,)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_frames_close_in_any_order(order: tuple[int, ...]) -> None:
    state, owner = owners("a")
    frames = []
    for count in range(3):
        state, frame = sf.open_frame(state, owner)
        frames.append(frame)
        assert len(state.owners[owner].frames) == count + 1
    for number in order:
        with kept(state):
            after = sf.close_frame(state, frames[number])
        state = after
        assert frames[number].index not in state.owners[owner].frames
    assert state.owners[owner].frames == ()


def test_a_frame_says_whose_it_is_and_compares_by_value() -> None:
    state, owner = owners("a")
    state, frame = sf.open_frame(state, owner)
    assert frame == sf.Frame(owner, state.owners[owner].frames[0])
    assert hash(frame) == hash(sf.Frame(frame.owner, frame.index))
    with pytest.raises(dataclasses.FrozenInstanceError, match="index"):
        frame.index = 3  # type: ignore[misc]


def test_closing_twice_is_refused() -> None:
    state, owner = owners("encoder")
    state, frame = sf.open_frame(state, owner)
    state, other = sf.open_frame(state, owner)
    after = sf.close_frame(state, frame)
    with kept(after), pytest.raises(sf.OwnershipError, match=r"Expected an open frame.*encoder.*, got .*closed"):
        sf.close_frame(after, frame)
    assert after.owners[owner].frames == (other.index,)
    assert sf.close_frame(state, frame).owners == after.owners, "in the old state it is open still"


def test_a_frame_that_was_never_opened_is_refused() -> None:
    state, owner = owners("encoder")
    for index in (0, 1, -1):
        with kept(state), pytest.raises(sf.OwnershipError, match=r"Expected an open frame.*encoder.*, got .*never"):
            sf.close_frame(state, sf.Frame(owner, index))


def test_a_frame_of_another_owner_is_refused() -> None:
    state, first, second = owners("encoder", "decoder")
    state, _ = sf.open_frame(state, first)
    state, frame = sf.open_frame(state, first)
    state, _ = sf.open_frame(state, second)
    with kept(state), pytest.raises(sf.OwnershipError, match=r"Expected an open frame.*decoder.*, got .*"):
        sf.close_frame(state, sf.Frame(second, frame.index))


@pytest.mark.parametrize("not_one", [None, 0, (0, 0), "frame"], ids=repr)
def test_what_is_no_frame_is_refused(not_one: Any) -> None:
    state, owner = owners("a")
    state, _ = sf.open_frame(state, owner)
    with pytest.raises(TypeError, match=r"Expected a Frame, got"):
        sf.close_frame(state, not_one)


def test_release_drops_frames() -> None:
    state, owner = owners("encoder")
    state, frame = sf.open_frame(state, owner)
    with kept(state):
        released = sf.release(state, owner)
    with pytest.raises(sf.OwnershipError, match=r"Expected .*owner 0.*, got .*released"):
        sf.close_frame(released, frame)
    with pytest.raises(sf.OwnershipError, match=r"Expected .*owner 0.*, got .*released"):
        sf.open_frame(released, owner)
    assert sf.close_frame(state, frame).owners[owner].frames == ()


def test_the_last_frame_takes_with_it_what_was_queued_inside() -> None:
    state, owner = owners("a")
    state = sf.push_inputs(state, owner, (torch.tensor([1.0]),))
    state, frame = sf.open_frame(state, owner)
    state, inner = sf.open_frame(state, owner)
    state = sf.push_inputs(state, owner, (torch.tensor([2.0]),))
    state = sf.close_frame(state, frame)
    assert len(state.inputs[owner].entries) == 2, "one is open still"
    with kept(state):
        state = sf.close_frame(state, inner)
    state, (taken,) = sf.take_inputs(state, owner)
    assert taken.tolist() == [1.0]
    state, spec = sf.take_inputs(state, owner)
    assert isinstance(spec, sf.InputSpec)
    (made,) = sf.materialize(spec)
    assert made.shape == (1,)


def test_a_frame_that_is_closed_before_a_push_takes_nothing() -> None:
    state, owner = owners("a")
    state, frame = sf.open_frame(state, owner)
    state = sf.close_frame(state, frame)
    state = sf.push_inputs(state, owner, (torch.tensor([3.0]),))
    _, (taken,) = sf.take_inputs(state, owner)
    assert taken.tolist() == [3.0]


def test_frames_of_one_owner_leave_the_other_alone() -> None:
    state = whole_state()
    (own,) = state.owners[1].frames
    after = sf.close_frame(sf.open_frame(state, 1)[0], sf.Frame(1, own))
    alone, before = sf.release(after, 1), sf.release(state, 1)
    assert sf.tree_equal(alone, before)
    assert len(after.inputs[0].entries) == 2


def test_a_frame_changes_nothing_but_its_owner() -> None:
    state = whole_state()
    opened, frame = sf.open_frame(state, 0)
    assert sf.tree_equal(replace(opened, owners=state.owners), state)
    closed = sf.close_frame(opened, frame)
    assert closed.owners[0] == replace(state.owners[0], next_frame=state.owners[0].next_frame + 1)
    assert all(one is other for one, other in zip(*map(sf.state.tree_leaves, (closed, state)), strict=True))
