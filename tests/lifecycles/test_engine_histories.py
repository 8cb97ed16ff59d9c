"""Compiled functions in random order in one state: each comes to the bits that it comes to when it is alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

import scoped_fn as sf
from tests.helpers import assert_same, process_unchanged
from tests.lifecycles.engines import Trainer, World, batch, trainer
from tests.lifecycles.graphs import sine_pass

MOST = 5
KINDS = ("autograd", "value_and_grad")
PICK = st.integers(0, MOST - 1)
Action = tuple[str, int]
some = precondition(lambda self: bool(self.live))


def act(one: Trainer, action: Action) -> None:
    """Does one thing with a trainer; the number says with which batch, or which passes."""
    name, number = action
    if name == "forward":
        one.forward(batch(number))
    elif name == "finish":  # what waits gets its backward and its step
        one.backward()
        one.step()
    elif name == "evaluate":
        one.losses.append(one.evaluate(batch(number)))
    else:
        one.recompile(sf.Passes(captured=sine_pass) if number % 2 else sf.Passes())


@functools.cache
def alone(kind: str, seed: int, actions: tuple[Action, ...]) -> Any:
    """What a trainer comes to in a state of its own."""
    one = trainer(kind, seed)
    for action in actions:
        act(one, action)
    return one.outcome()


class EngineHistories(RuleBasedStateMachine):
    """Up to five trainers in one state, and what each did."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.world = World()
        self.live: list[tuple[Trainer, str, int, list[Action]]] = []
        self.number = 0

    def do(self, pick: int, name: str, number: int | None = None) -> None:
        one, _, _, actions = self.live[pick % len(self.live)]
        self.number += 1
        action = (name, self.number % 3 if number is None else number)
        owner = one.fn.owner
        others = {token: sf.release(self.world.state, owner) for token in [owner]}
        with process_unchanged():
            act(one, action)
        assert one.fn.owner == owner
        assert sf.tree_equal(sf.release(self.world.state, owner), others[owner]), "another owner's data moved"
        actions.append(action)

    def is_waiting(self, pick: int) -> bool:
        actions = self.live[pick % len(self.live)][3]
        return [name for name, _ in actions if name in ("forward", "finish")][-1:] == ["forward"]

    @precondition(lambda self: len(self.live) < MOST)
    @rule(kind=st.sampled_from(KINDS), seed=st.integers(0, 1))
    def compile(self, kind: str, seed: int) -> None:
        before = self.world.state
        with process_unchanged():
            one = trainer(kind, seed, self.world)
        assert one.fn.owner == before.next_token
        self.live.append((one, kind, seed, []))

    @some
    @rule(pick=PICK)
    def forward(self, pick: int) -> None:
        self.do(pick, "forward")

    @some
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        if not self.is_waiting(pick):
            self.do(pick, "forward")
        self.do(pick, "finish")

    @some
    @rule(pick=PICK)
    def evaluate(self, pick: int) -> None:
        self.do(pick, "evaluate")

    @some
    @rule(pick=PICK, number=st.integers(0, 1))
    def recompile(self, pick: int, number: int) -> None:
        one = self.live[pick % len(self.live)][0]
        generation = self.world.state.owners[one.fn.owner].generation
        self.do(pick, "recompile", number)
        assert self.world.state.owners[one.fn.owner].generation == generation + 1

    @precondition(lambda self: len(self.live) > 1)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        gone = self.live.pop(pick % len(self.live))
        self.check(*gone)
        gone[0].release()
        assert gone[0].fn.owner not in self.world.state.owners

    def check(self, one: Trainer, kind: str, seed: int, actions: list[Action]) -> None:
        assert_same(one.outcome(), alone(kind, seed, tuple(actions)), what=f"{kind} {seed} after {actions}")

    def teardown(self) -> None:
        for entry in self.live:
            self.check(*entry)
        assert set(self.world.state.owners) == {one.fn.owner for one, *_ in self.live}
        torch.set_num_threads(self.threads)


TestEngineHistories = EngineHistories.TestCase
# A failure is not made smaller: that would compile for minutes.
TestEngineHistories.settings = settings(max_examples=6, stateful_step_count=15, phases=[Phase.generate])
