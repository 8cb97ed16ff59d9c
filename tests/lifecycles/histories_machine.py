"""The base of histories: owners come and go, no owner sees another, and old states stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import chex  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import scoped_fn as sf
from tests.generators.arrays import arrays_of, kept, static_of
from tests.generators.operations import LIMIT
from tests.lifecycles.histories_model import Expected, Held

MOST = 5
PICK = st.integers(0, MOST - 1)
some_owner = precondition(lambda self: bool(self.expected.owners))


class OwnerHistories(RuleBasedStateMachine):
    """A state, what it must hold, and the states before it with what they held."""

    def __init__(self) -> None:
        super().__init__()
        self.state = sf.init_state(key=3)
        self.expected = Expected()
        self.released: list[int] = []
        self.past: list[tuple[sf.CompilerState, Any, Any]] = []

    @initialize(names=st.lists(st.sampled_from(["encoder", "decoder"]), min_size=1, max_size=3))
    def begin(self, names: list[str]) -> None:
        for name in names:
            self.state, token = sf.acquire(self.state, name)
            self.expected.owners[token] = Held(name)

    def pick(self, number: int) -> tuple[int, Held]:
        tokens = sorted(self.expected.owners)
        token = tokens[number % len(tokens)]
        return token, self.expected.owners[token]

    @contextlib.contextmanager
    def changes(self, token: int | None) -> Iterator[sf.CompilerState]:
        """The block may change what one owner holds, and nothing of the others; the old state stays."""
        old = self.state
        self.past.append((old, arrays_of(old), static_of(old)))
        with kept(old):
            yield old
        before, after = (one if token is None else without(one, token) for one in (old, self.state))
        chex.assert_trees_all_equal(arrays_of(after), arrays_of(before))
        assert (after.owners, after.overrides) == (before.owners, before.overrides)

    @precondition(lambda self: len(self.expected.owners) < MOST)
    @rule(name=st.sampled_from(["encoder", "decoder"]))
    def acquire(self, name: str) -> None:
        old = self.state
        self.state, token = sf.acquire(old, name)
        assert token not in [*old.owners, *self.released]
        assert sf.tree_equal(replace(sf.release(self.state, token), next_token=old.next_token), old)
        self.expected.owners[token] = Held(name)

    @some_owner
    @rule(number=PICK)
    def release(self, number: int) -> None:
        token, _ = self.pick(number)
        with self.changes(token) as old:
            self.state = sf.release(old, token)
        del self.expected.owners[token]
        self.released.append(token)

    @precondition(lambda self: self.released)
    @rule(number=PICK)
    def release_again(self, number: int) -> None:
        token = self.released[number % len(self.released)]
        with kept(self.state), pytest.raises(sf.OwnershipError, match=rf"Expected .*owner {token}.*, got .*released"):
            sf.release(self.state, token)

    @precondition(lambda self: self.past)
    @rule(number=st.integers(0, 99))
    def an_old_state_can_be_used(self, number: int) -> None:
        old = self.past[number % len(self.past)][0]
        with kept(old, self.state):
            state, token = sf.acquire(old, "late")
            state = sf.push_inputs(sf.open_frame(state, token)[0], token, (torch.ones(2),))
            state = sf.set_override(state, token, LIMIT, 9)
            for other in list(state.owners):
                state = sf.release(state, other)
        assert not any((state.owners, state.overrides, state.inputs))

    @invariant()
    def holds_what_the_model_says(self) -> None:
        self.expected.check(self.state)

    def teardown(self) -> None:
        for state, arrays, static in self.past:
            chex.assert_trees_all_equal(arrays_of(state), arrays)
            assert static_of(state) == static


def without(state: sf.CompilerState, token: int) -> sf.CompilerState:
    """The state without an owner; as it is, if it does not hold it."""
    return sf.release(state, token) if token in state.owners else state
