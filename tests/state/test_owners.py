"""Laws of acquire and release, over random histories."""

from __future__ import annotations

from dataclasses import replace

import chex
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

import scoped_fn as sf
from scoped_fn.state import FrozenDict, Owner, set_buffers


class History(RuleBasedStateMachine):
    """A state against a plain dictionary that says what it must hold."""

    live = Bundle("live")
    dead = Bundle("dead")

    def __init__(self) -> None:
        super().__init__()
        self.state = sf.init_state(key=1)
        self.expected: dict[int, tuple[str, dict[str, float]]] = {}
        self.handed_out: set[int] = set()

    @rule(target=live, name=st.sampled_from(["encoder", "decoder", ""]))
    def acquire(self, name: str) -> int:
        old = self.state
        self.state, token = sf.acquire(old, name)
        assert token not in self.handed_out
        assert token not in old.owners
        self.handed_out.add(token)
        self.expected[token] = (name, {})
        return token

    @rule(token=live, value=st.floats(-10, 10), count=st.integers(0, 3))
    def set_buffers(self, token: int, value: float, count: int) -> None:
        named = {f"buffer_{index}": value for index in range(count)}
        self.state = set_buffers(self.state, token, {name: torch.tensor(one) for name, one in named.items()})
        self.expected[token] = (self.expected[token][0], named)

    @rule(target=dead, token=consumes(live))
    def release(self, token: int) -> int:
        old = self.state
        self.state = sf.release(old, token)
        del self.expected[token]
        assert token in old.owners, "the state handed in lost its owner"
        return token

    @rule(token=dead)
    def release_again(self, token: int) -> None:
        with pytest.raises(sf.OwnershipError, match=r"Expected .*, got .*released"):
            sf.release(self.state, token)

    @rule(name=st.sampled_from(["guest"]))
    def acquire_then_release(self, name: str) -> None:
        acquired, token = sf.acquire(self.state, name)
        after = sf.release(set_buffers(acquired, token, {"mean": torch.ones(3)}), token)
        assert sf.tree_equal(replace(after, next_token=self.state.next_token), self.state)
        assert after.next_token > token

    @invariant()
    def holds_what_was_put_in(self) -> None:
        assert self.state.owners == {token: Owner(name) for token, (name, _) in self.expected.items()}
        for token, (_, named) in self.expected.items():
            held = {name: leaf.numpy() for name, leaf in self.state.buffers.get(token, FrozenDict()).items()}
            chex.assert_trees_all_close(held, {name: torch.tensor(one).numpy() for name, one in named.items()}, rtol=0)
        assert set(self.state.buffers) <= set(self.state.owners)


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=40, stateful_step_count=20)


def test_the_same_program_gives_the_same_tokens() -> None:
    def program() -> list[int]:
        state, first = sf.acquire(sf.init_state(), "first")
        state, second = sf.acquire(state, "second")
        state, third = sf.acquire(sf.release(state, second), "third")
        return [first, second, third]

    assert program() == program()
    assert len(set(program())) == 3


def test_release_takes_anything_with_an_owner() -> None:
    state, fn = sf.compile(sf.init_state(), torch.sin, (torch.ones(2),), backend="eager")
    assert set(state.owners) == {fn.owner}
    assert sf.release(state, fn).owners == {}


@pytest.mark.parametrize("token", [0, 5, -1, "encoder", None])
def test_an_owner_that_was_never_there_is_refused(token: object) -> None:
    with pytest.raises(sf.OwnershipError, match=r"Expected a state that holds owner .*, got .*never"):
        sf.release(sf.init_state(), token)
    with pytest.raises(sf.OwnershipError, match=r"Expected a state that holds owner .*, got .*never"):
        set_buffers(sf.init_state(), token, {})  # type: ignore[arg-type]


def test_ownership_error_is_a_runtime_error() -> None:
    assert issubclass(sf.OwnershipError, RuntimeError)


def test_other_owners_keep_their_very_tensors() -> None:
    state, first = sf.acquire(sf.init_state(), "first")
    state, second = sf.acquire(state, "second")
    mean = torch.ones(3)
    state = set_buffers(set_buffers(state, first, {"mean": mean}), second, {"mean": torch.zeros(3)})
    after = sf.release(state, second)
    assert after.buffers[first]["mean"] is mean
    assert torch.equal(mean, torch.ones(3))
