"""What a state must hold after a history of operations, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import scoped_fn as sf


@dataclass
class Queued:
    """Inputs that were pushed: one tensor of a size, filled with a number."""

    size: int
    value: float
    in_frame: bool

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (torch.full((self.size,), self.value),)


@dataclass
class Held:
    """What one owner holds."""

    name: str
    buffers: dict[str, float] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    frames: list[int] = field(default_factory=list)
    opened: list[sf.Frame] = field(default_factory=list)
    queue: list[Queued] = field(default_factory=list)
    newest: Queued | None = None

    def close(self, frame: sf.Frame) -> None:
        self.frames.remove(frame.index)
        if not self.frames:
            self.queue = [one for one in self.queue if not one.in_frame]


@dataclass
class Expected:
    """What the whole state holds."""

    owners: dict[int, Held] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    scopes: int = 0

    def overrides(self) -> dict[str, dict[int, Any]]:
        """Key -> token -> value, of the keys that somebody holds."""
        keys = sorted({key for held in self.owners.values() for key in held.overrides})
        return {
            key: {token: held.overrides[key] for token, held in self.owners.items() if key in held.overrides}
            for key in keys
        }

    def check(self, state: sf.CompilerState) -> None:
        """The state holds this, and nothing else."""
        assert set(state.owners) == set(self.owners)
        assert state.overrides == self.overrides()
        assert state.constants == self.constants
        assert len(state.autocast) == self.scopes
        assert set(state.buffers) | set(state.inputs) <= set(self.owners)
        for token, held in self.owners.items():
            assert state.owners[token].name == held.name
            assert list(state.owners[token].frames) == held.frames
            assert {name: one.item() for name, one in state.buffers.get(token, {}).items()} == held.buffers
            self.check_queue(state, token)

    def check_queue(self, state: sf.CompilerState, token: int) -> None:
        """All that was pushed for an owner and not taken comes out, in order; then the spec of the newest."""
        for queued in self.owners[token].queue:
            state, (taken,) = sf.take_inputs(state, token)
            assert taken.tolist() == [queued.value] * queued.size
        newest = self.owners[token].newest
        if newest is not None:
            after, spec = sf.take_inputs(state, token)
            assert after is state
            assert isinstance(spec, sf.InputSpec)
            assert sf.materialize(spec)[0].shape == (newest.size,)
