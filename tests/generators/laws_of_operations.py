"""Laws of operations on states, one by one and in sequences."""

from __future__ import annotations

import operator
from dataclasses import replace

import chex  # type: ignore[import-untyped]
import numpy as np
import torch

import scoped_fn as sf
from tests.generators.arrays import arrays_of, assert_same_bits, bits, kept, static_of
from tests.generators.operations import Operation, run, twin_of

Given = tuple[sf.CompilerState, tuple[Operation, ...]]  # a state, and operations of which each is applied to it
NEW_TENSORS = {"set_buffers", "add_fp8", "update_scales"}  # equal numbers in tensors of their own


# Operations: pure, and what they give depends on nothing else.


def leaves_its_state_untouched(given: Given) -> None:
    state, changes = given
    with kept(state):
        for change in changes:
            after = change(state)
            assert isinstance(after, sf.CompilerState)
            assert after.next_token >= state.next_token
            assert all(isinstance(leaf, torch.Tensor) for leaf in sf.state.tree_leaves(after))


def gives_the_same_again(given: Given) -> None:
    state, changes = given
    for change in changes:
        once = change(state)
        for other in (change(state), change(twin_of(state))):
            assert_same_bits(other, once)
            assert sf.tree_equal(other, once)


def nothing_changed_is_the_very_state(given: Given) -> None:
    """Twice, since most operations have nothing more to do the second time."""
    state, changes = given
    for change in changes:
        before = state
        for _ in range(2):
            after = change(before)
            if sf.tree_equal(after, before) and change.name not in NEW_TENSORS:
                assert after is before
            before = after


def others_keep_their_very_tensors(given: Given) -> None:
    """What an operation is not about stays, not only in value but as the same tensors."""
    state, changes = given
    for change in changes:
        after = change(state)
        for owner in set(state.owners) & set(after.owners) - {_subject(state, change)}:
            for field in ("buffers", "inputs"):
                before, now = getattr(state, field).get(owner), getattr(after, field).get(owner)
                assert before is now or all(map(operator.is_, *map(sf.state.tree_leaves, ({0: before}, {0: now}))))


def _subject(state: sf.CompilerState, change: Operation) -> int:
    owners = sorted(state.owners)
    return owners[change.pick % len(owners)] if owners else -1


# States that come of sequences of operations.


def a_twin_goes_the_same_way(history: list[Operation]) -> None:
    assert_same_bits(run(sf.init_state(key=1), history), run(sf.init_state(key=1), history))


def old_states_stay(history: list[Operation]) -> None:
    states = [sf.init_state(key=1)]
    was = [(arrays_of(states[0]), static_of(states[0]))]
    for one in history:
        states.append(one(states[-1]))
        was.append((arrays_of(states[-1]), static_of(states[-1])))
    for state, (arrays, static) in zip(states, was, strict=True):
        chex.assert_trees_all_equal(arrays_of(state), arrays)
        assert static_of(state) == static


def acquire_then_release(state: sf.CompilerState) -> None:
    after, token = sf.acquire(state, "guest")
    assert token not in state.owners
    assert token == state.next_token
    full = sf.set_override(
        sf.push_inputs(after, token, (torch.ones(2),)), token, "torch._dynamo.config.recompile_limit", 5
    )
    full, _ = sf.open_frame(sf.set_buffers(full, token, {"mean": torch.ones(1)}), token)
    for one in (after, full):
        assert_same_bits(replace(sf.release(one, token), next_token=state.next_token), state)


def releasing_all_leaves_what_is_nobodys(state: sf.CompilerState) -> None:
    empty = state
    for owner in list(state.owners):
        empty = sf.release(empty, owner)
    assert not any((empty.owners, empty.buffers, empty.fp8, empty.overrides, empty.inputs))
    assert (empty.constants, empty.autocast, empty.next_token) == (state.constants, state.autocast, state.next_token)
    assert_same_bits(empty.key, state.key)


def order_of_releases_does_not_matter(state: sf.CompilerState) -> None:
    forth, back = state, state
    for owner in sorted(state.owners):
        forth = sf.release(forth, owner)
    for owner in sorted(state.owners, reverse=True):
        back = sf.release(back, owner)
    assert_same_bits(forth, back)


def keys_follow_one_another(state: sf.CompilerState) -> None:
    after, key = sf.next_key(state)
    both = sf.split(state.key)
    np.testing.assert_array_equal(bits(torch.stack([after.key, key])), bits(both))
    assert_same_bits(replace(after, key=state.key), state)
