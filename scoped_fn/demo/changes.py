"""What a schedule does to a run: entries that come into force, and the memory of a step before and after."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import scoped_fn as sf

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Footprint:
    """The memory of a training step.

    Attributes:
        saved_bytes: What its forward keeps for its backward, parameters and inputs not counted.
        peak_bytes: The most that is alive at once.
    """

    saved_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Change:
    """An entry of a schedule that came into force.

    Attributes:
        step: The first step made with it in this process, counted from 0.
        passes: Its passes in words.
        compile_s: Seconds of profiling and compiling.
        remarks: What the passes warned of, a line each.
        footprint: The memory of a step from here on; None where it could not be measured.
        plain: The memory of a step without passes; None where it could not be measured.
    """

    step: int
    passes: str
    compile_s: float
    remarks: tuple[str, ...] = ()
    footprint: Footprint | None = None
    plain: Footprint | None = None

    def __str__(self) -> str:
        return f"step {self.step}: {self.passes}, {self.effect}"

    @property
    def effect(self) -> str:
        """What it did, in words."""
        parts = [f"compiled in {self.compile_s:.1f} s"]
        if self.footprint is not None:
            plain = self.plain or self.footprint
            parts.append(f"keeps {_mebibytes(self.footprint.saved_bytes, plain.saved_bytes)}")
            parts.append(f"peak {_mebibytes(self.footprint.peak_bytes, plain.peak_bytes)}")
        return " Note: ".join([", ".join(parts) + ("." if self.remarks else ""), *self.remarks])


@contextmanager
def remarks_of_passes() -> Iterator[list[str]]:
    """Gives a list that holds after the block, a line each, what the passes in it warned of."""
    remarks: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message="Expected ")  # how the library's own warnings begin
        yield remarks
    remarks += [" ".join(str(each.message).split()) for each in caught]


def advance_on(
    state: sf.CompilerState, loss: sf.CompiledFn, step: int, batch: Batch
) -> tuple[sf.CompilerState, sf.CompiledFn]:
    """Returns `sf.advance` of a compiled loss; passes that come into force profile it on the batch."""
    if loss.schedule is not None and loss.schedule.due(step) != loss.entry:
        state = sf.push_inputs(state, loss, batch)
    with torch.no_grad():
        return sf.advance(state, loss, step)


def footprint_of(state: sf.CompilerState, loss: sf.CompiledFn) -> tuple[sf.CompilerState, Footprint | None]:
    """Returns the memory of a training step with a compiled loss; None where it cannot run node by node."""
    state, profile = sf.profile(state, loss, training=True)
    return state, Footprint(profile.saved_bytes, profile.peak_bytes) if profile.complete else None


def plain_footprint(state: sf.CompilerState, loss: sf.CompiledFn, batch: Batch) -> Footprint | None:
    """Returns the memory of a training step without passes."""
    state = sf.push_inputs(state, loss, batch)
    if loss.entry is not None:  # otherwise it is without passes as it is
        with torch.no_grad():
            state, loss = sf.recompile(state, loss, sf.Passes())
    return footprint_of(state, loss)[1]


def _mebibytes(now: int, plain: int) -> str:
    return f"{now / 2**20:.1f} MiB" + ("" if now == plain else f" of {plain / 2**20:.1f}")
