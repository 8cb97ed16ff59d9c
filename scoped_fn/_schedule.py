"""`Schedule`: which passes are in force from which step on, as data."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scoped_fn._errors import SpecError
from scoped_fn.passes.guided import Asked, as_asked


@dataclass(frozen=True)
class Schedule:
    """Passes by step: each entry holds from its step until the next one's.

    Args:
        entries: Pairs of a step and passes, as `compile` takes them: `Passes`, guided passes, a sequence of them, or
            None for none. Steps rise.

    Example:
        >>> import scoped_fn as sf
        >>> schedule = sf.Schedule([(0, None), (50, sf.passes.memory_budget(0.5))])
        >>> schedule.due(49), schedule.due(120)
        (0, 1)
    """

    entries: tuple[tuple[int, Asked], ...]

    def __init__(self, entries: Sequence[tuple[int, Any]]) -> None:
        """Checks the entries."""
        if not isinstance(entries, Sequence) or isinstance(entries, str):
            raise SpecError(f"Expected a sequence of entries (step, passes), got {entries!r}. Write [(0, None), ...].")
        checked = tuple((step, () if passes is None else as_asked(passes)) for step, passes in map(_pair, entries))
        steps = [step for step, _ in checked]
        if not checked or steps != sorted(set(steps)):
            raise SpecError(f"Expected entries at rising steps, got {steps or 'none'}. Sort them, one for each step.")
        object.__setattr__(self, "entries", checked)

    def due(self, step: int) -> int | None:
        """Returns the index of the entry that is in force at a step, the newest that is due; None before the first.

        Raises:
            SpecError: The step is no whole number of 0 or more.
        """
        _check_step(step)
        return max((i for i, (start, _) in enumerate(self.entries) if start <= step), default=None)


def _pair(entry: Any) -> tuple[int, Any]:
    if not isinstance(entry, tuple) or len(entry) != 2:
        raise SpecError(f"Expected entries as pairs (step, passes), got {entry!r}. Write (50, passes).")
    _check_step(entry[0])
    return entry


def _check_step(step: Any) -> None:
    if not hasattr(step, "__index__") or isinstance(step, bool) or operator.index(step) < 0:
        raise SpecError(f"Expected a step as a whole number of 0 or more, got {step!r}. Count steps from 0.")
