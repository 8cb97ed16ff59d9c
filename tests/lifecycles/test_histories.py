"""All operations on a state, in random order, against a plain model."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import scoped_fn as sf
from scoped_fn.state import set_buffers
from tests.generators.arrays import kept
from tests.generators.operations import AUTOTUNE, LIMIT
from tests.helpers import process_unchanged
from tests.lifecycles.histories_machine import PICK, OwnerHistories, some_owner
from tests.lifecycles.histories_model import Queued

SETTINGS = st.one_of(st.tuples(st.just(AUTOTUNE), st.booleans()), st.tuples(st.just(LIMIT), st.integers(1, 3)))
DROP = "drop"


class Histories(OwnerHistories):
    """The operations on what owners hold, and on what is nobody's."""

    @some_owner
    @rule(number=PICK, setting=SETTINGS)
    def set_override(self, number: int, setting: tuple[str, Any]) -> None:
        token, held = self.pick(number)
        key, value = setting
        with self.changes(token) as old, process_unchanged():
            self.state = sf.set_override(old, token, key, value)
        assert (self.state is old) == (held.overrides.get(key) == value and key in held.overrides)
        held.overrides[key] = value

    @some_owner
    @rule(number=PICK, key=st.sampled_from([AUTOTUNE, LIMIT]))
    def drop_override(self, number: int, key: str) -> None:
        token, held = self.pick(number)
        if key not in held.overrides:
            with kept(self.state), pytest.raises(sf.OwnershipError, match=rf"Expected .*{held.name}.*, got"):
                sf.drop_override(self.state, token, key)
            return
        with self.changes(token) as old:
            self.state = sf.drop_override(old, token, key)
        del held.overrides[key]

    @some_owner
    @rule(number=PICK)
    def effects(self, number: int) -> None:
        token, held = self.pick(number)
        before = {AUTOTUNE: inductor_config.max_autotune, LIMIT: dynamo_config.recompile_limit}
        with process_unchanged(), sf.effects(self.state, token):
            now = {AUTOTUNE: inductor_config.max_autotune, LIMIT: dynamo_config.recompile_limit}
            assert now == {**before, **held.overrides}

    @some_owner
    @rule(number=PICK)
    def open_frame(self, number: int) -> None:
        token, held = self.pick(number)
        with self.changes(token) as old:
            self.state, frame = sf.open_frame(old, token)
        assert frame not in held.opened
        held.opened.append(frame)
        held.frames.append(frame.index)

    @some_owner
    @rule(number=PICK, which=st.integers(0, 9))
    def close_frame(self, number: int, which: int) -> None:
        token, held = self.pick(number)
        frames = [one for one in held.opened if one.index in held.frames] if which else held.opened
        frame = frames[which % len(frames)] if frames else sf.Frame(token, 99)
        if frame.index not in held.frames:
            with kept(self.state), pytest.raises(sf.OwnershipError, match=r"Expected an open frame.*, got"):
                sf.close_frame(self.state, frame)
            return
        with self.changes(token) as old:
            self.state = sf.close_frame(old, frame)
        held.close(frame)

    @some_owner
    @rule(number=PICK, size=st.integers(1, 3), value=st.floats(-9, 9, width=32))
    def push_inputs(self, number: int, size: int, value: float) -> None:
        token, held = self.pick(number)
        queued = Queued(size, value, bool(held.frames))
        with self.changes(token) as old:
            self.state = sf.push_inputs(old, token, queued.inputs)
        held.queue.append(queued)
        held.newest = queued

    @some_owner
    @rule(number=PICK, size=st.integers(1, 3), value=st.floats(-9, 9, width=32))
    def a_forward(self, number: int, size: int, value: float) -> None:
        """What a training step does first: by themselves the two rarely meet."""
        self.open_frame(number)
        self.push_inputs(number, size, value)

    @some_owner
    @rule(number=PICK)
    def take_inputs(self, number: int) -> None:
        token, held = self.pick(number)
        if held.newest is None:
            with kept(self.state), pytest.raises(ValueError, match=rf"Expected .*{held.name}.*, got"):
                sf.take_inputs(self.state, token)
        elif not held.queue:
            assert sf.take_inputs(self.state, token)[0] is self.state
        else:
            with self.changes(token) as old:
                self.state, (taken,) = sf.take_inputs(old, token)
            assert torch.equal(taken, held.queue.pop(0).inputs[0])

    @rule(name=st.sampled_from(["rank", "ub.is_fp8"]), value=st.sampled_from([DROP, 1, True, None, (10, 0)]))
    def constant(self, name: str, value: Any) -> None:
        if value != DROP:
            with self.changes(None) as old:
                self.state = sf.set_constant(old, name, value)
            self.expected.constants[name] = value
        elif name in self.expected.constants:
            with self.changes(None) as old:
                self.state = sf.drop_constant(old, name)
            del self.expected.constants[name]
        else:
            with kept(self.state), pytest.raises(KeyError, match=rf"Expected .*, got '{name}'"):
                sf.drop_constant(self.state, name)

    @some_owner
    @rule(number=PICK, value=st.floats(-9, 9, width=32), count=st.integers(0, 2))
    def set_buffers(self, number: int, value: float, count: int) -> None:
        token, held = self.pick(number)
        held.buffers = {f"buffer_{index}": value for index in range(count)}
        with self.changes(token) as old:
            self.state = set_buffers(old, token, {name: torch.tensor(one) for name, one in held.buffers.items()})

    @rule(begin=st.booleans())
    def autocast(self, begin: bool) -> None:
        if not begin and not self.expected.scopes:
            with kept(self.state), pytest.raises(RuntimeError, match="Expected an open autocast scope"):
                sf.end_autocast(self.state)
            return
        with self.changes(None) as old:
            self.state = sf.autocast(old, sf.DelayedScaling()) if begin else sf.end_autocast(old)
        self.expected.scopes += 1 if begin else -1

    @precondition(lambda self: len(self.past) % 8 == 7)
    @rule()
    def travel(self) -> None:
        with self.changes(None) as old:
            self.state = pickle.loads(pickle.dumps(old))
        assert sf.tree_equal(self.state, old)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40)
