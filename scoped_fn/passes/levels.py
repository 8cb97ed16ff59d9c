"""`Passes`: what `compile` changes on the way, level by level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch.fx

from scoped_fn._errors import SpecError
from scoped_fn.passes.graph_pass import ConstantsPass, GraphPass, chain, check_pass, identity

Halves = tuple[torch.fx.GraphModule, torch.fx.GraphModule]
PartitionFn = Callable[[torch.fx.GraphModule, Sequence[Any], Sequence[Any], int], Halves]
SavedPass = Callable[[torch.fx.GraphModule, torch.fx.GraphModule, int], Halves]


@dataclass(frozen=True)
class Passes:
    """The passes that `compile` applies, by level.

    Attributes:
        captured: On the torch-level graph, before any lowering.
        joint: On the ATen graph of forward and backward together, before the partition.
        forward: On the forward graph of training, and on the inference graph.
        backward: On the backward graph.
        partition: `(gm, primals, tangents, num_forward) -> (forward, backward)`: cuts the joint graph, in place of
            torch's minimum cut. After `num_forward` outputs the forward returns what the backward takes first.
        saved: `(forward, backward, num_forward) -> (forward, backward)`, before the passes on each of them: changes
            how values get from one to the other.
    """

    captured: GraphPass = identity
    joint: GraphPass = identity
    forward: GraphPass = identity
    backward: GraphPass = identity
    partition: PartitionFn | None = None
    saved: SavedPass | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("partition", "saved"):
                check_pass(value, field.name)
            elif value is not None and (isinstance(value, ConstantsPass) or not callable(value)):
                raise SpecError(
                    f"Expected {field.name} to be a function as its docstring says, got {value!r}. Pass one."
                )

    @property
    def reads_constants_later(self) -> bool:
        """Whether a pass on a lowered graph reads constants."""
        return any(isinstance(each, ConstantsPass) for each in (self.joint, self.forward, self.backward))

    @property
    def acts_on_halves(self) -> bool:
        """Whether something depends on forward and backward being two graphs."""
        acts = self.forward is not identity or self.backward is not identity
        return acts or self.partition is not None or self.saved is not None


def combine(parts: Sequence[Passes]) -> Passes:
    """Returns the passes one after the other, level by level.

    Raises:
        SpecError: Two of them cut the joint graph.
    """
    cuts = [each.partition for each in parts if each.partition is not None]
    if len(cuts) > 1:
        raise SpecError(f"Expected one partition, got {len(cuts)}. Leave one in.")
    made = {name: chain(*(getattr(p, name) for p in parts)) for name in ("captured", "joint", "forward", "backward")}
    saved = [each.saved for each in parts if each.saved is not None]
    return Passes(partition=cuts[0] if cuts else None, saved=_in_turn(saved) if saved else None, **made)


def _in_turn(saved: Sequence[SavedPass]) -> SavedPass:
    if len(saved) == 1:
        return saved[0]

    def run(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, num_forward: int) -> Halves:
        for each in saved:
            forward, backward = each(forward, backward, num_forward)
        return forward, backward

    return run
