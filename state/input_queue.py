"""Queued inputs of one owner, and what stays known of them: the data that `push_inputs` and `take_inputs` move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class QueuedInputs:
    """The inputs of one call.

    Attributes:
        structure: How they are built from their tensors. Static.
        in_frame: Whether they were queued while a frame of their owner was open. Static.
        tensors: The tensors, as they were given.
    """

    structure: Any
    in_frame: bool
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class InputSpec:
    """What inputs look like, without their values.

    Attributes:
        structure: How they are built from tensors. Static.
        specs: Shape, strides, dtype and device of each tensor. Static.
        kept: Which tensors kept their values. Static.
        values: These values: tensors of integers, such as token ids.
    """

    structure: Any
    specs: tuple[Any, ...]
    kept: tuple[int, ...] = ()
    values: tuple[torch.Tensor, ...] = ()

    def __repr__(self) -> str:
        return f"InputSpec({', '.join(map(str, self.specs))})"


@dataclass(frozen=True, eq=False)
class InputQueue:
    """The queue of one owner.

    Attributes:
        entries: The oldest first.
        spec: Of the newest that were ever pushed.
    """

    entries: tuple[QueuedInputs, ...]
    spec: InputSpec


def queue_tensors(queue: InputQueue) -> dict[str, list[list[torch.Tensor]]]:
    """Returns the tensors of a queue as a tree of plain containers."""
    return {"entries": [list(entry.tensors) for entry in queue.entries], "spec": [list(queue.spec.values)]}


def queue_static(queue: InputQueue) -> Any:
    """Returns what of a queue is no tensor; hashable, compares by value."""
    entries = tuple((entry.structure, entry.in_frame) for entry in queue.entries)
    return entries, (queue.spec.structure, queue.spec.specs, queue.spec.kept)


def queue_from(static: Any, tensors: Mapping[str, Any]) -> InputQueue:
    """Returns the queue with these static parts and tensors."""
    entries = zip(static[0], tensors["entries"], strict=True)
    made = tuple(QueuedInputs(structure, in_frame, tuple(given)) for (structure, in_frame), given in entries)
    structure, specs, kept = static[1]
    return InputQueue(made, InputSpec(structure, specs, kept, tuple(tensors["spec"][0])))
