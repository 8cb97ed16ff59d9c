"""`memory_budget`: keep less from forward to backward, and compute the rest again where that costs least."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch.fx

from scoped_fn._errors import SpecError
from scoped_fn._graph import copy_graph, output_values
from scoped_fn._torch.aot import partition_with_min_cut
from scoped_fn.passes.cut import Cut, cut_at, node_bytes
from scoped_fn.passes.guided import PROFILE, GuidedPass
from scoped_fn.passes.levels import Halves, Passes

if TYPE_CHECKING:
    from scoped_fn._profile import Profile


def memory_budget(fraction: float) -> MemoryBudget:
    """Returns the pass that saves at most a fraction of the bytes that are saved without it.

    What is saved no longer is computed again in the backward, from what still is: first what takes the least time for
    its bytes, by a profile. Random operations never run again, so that a dropout mask is the same in both places.
    Gradients are those of the same operations on the same values.

    Args:
        fraction: 0 <= fraction <= 1. Where it cannot be reached, as little as possible is saved, with a warning.

    Raises:
        SpecError: The fraction is out of range.

    Example:
        >>> memory_budget(0.5)
        MemoryBudget(fraction=0.5)
    """
    return MemoryBudget(fraction)


@dataclass(frozen=True)
class MemoryBudget(GuidedPass):
    """What `memory_budget` returns.

    Attributes:
        fraction: Of the saved bytes.
    """

    fraction: float

    name: ClassVar[str] = "memory_budget"
    requires: ClassVar[frozenset[str]] = frozenset({PROFILE})
    conflicts: ClassVar[frozenset[str]] = frozenset({"memory_budget", "partition"})

    def __post_init__(self) -> None:
        valid = isinstance(self.fraction, (int, float)) and not isinstance(self.fraction, bool)
        if not valid or not 0 <= self.fraction <= 1:
            raise SpecError(f"Expected a fraction from 0 to 1, got {self.fraction!r}. 0.5 halves what is saved.")

    def passes(self, profile: Profile | None) -> Passes:
        """Returns the cut of the joint graph that keeps to the budget."""
        return Passes(partition=partial(cut_within, self.fraction, profile))


def cut_within(
    fraction: float,
    profile: Profile | None,
    gm: torch.fx.GraphModule,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    num_forward: int,
) -> Halves:
    """Returns forward and backward graphs; see `memory_budget`."""
    joint = copy_graph(gm)
    halves = partition_with_min_cut(joint, primals, tangents, num_forward)  # takes common subexpressions out of joint
    cut = Cut(joint, len(primals), num_forward)
    names = {node.name for node in output_values(halves[0])[num_forward:]}
    saved = {node for node in cut.forward if node.name in names}
    budget = fraction * sum(map(node_bytes, saved))
    measured = profile.seconds_by_name() if profile is not None else {}
    cost = {node: measured.get(node.name, _estimate(node)) for node in cut.forward}
    kept = _drop_cheapest(cut, saved, budget, cost)
    return halves if kept == saved else cut_at(cut, kept)


def _drop_cheapest(
    cut: Cut, saved: set[torch.fx.Node], budget: float, cost: dict[torch.fx.Node, float]
) -> set[torch.fx.Node]:
    """Returns what is left to save once values have been dropped, the cheapest for their bytes first, to fit."""
    kept = saved | (cut.fixed & cut.reached(saved))
    again = cut.recomputed(kept)
    size = sum(map(node_bytes, kept))
    order = {node: i for i, node in enumerate(cut.forward)}
    heap = [(0.0, order[node], node) for node in saved - cut.fixed]
    while heap and size > budget:
        known, at, node = heapq.heappop(heap)
        new, needed = cut.cone(node, kept, again)
        gain = node_bytes(node) - sum(map(node_bytes, needed))
        price = sum(cost[each] for each in new) / gain if gain > 0 else float("inf")
        if heap and price > known and price > heap[0][0]:
            heapq.heappush(heap, (price, at, node))  # dearer than when it was looked at: its turn comes later
        elif gain > 0:
            kept, again, size = (kept - {node}) | needed, again | new, size - gain
    if size > budget:
        warnings.warn(
            f"Expected at most {budget:,.0f} saved bytes, got {size:,.0f}: what is left is drawn at random or asked to "
            "be saved. Raise the fraction.",
            stacklevel=2,
        )
    return kept


def _estimate(node: torch.fx.Node) -> float:
    """Returns the seconds of a node that no profile knows: by the memory it touches, at 10 GB/s."""
    return 1e-10 * (node_bytes(node) + sum(map(node_bytes, node.all_input_nodes)))
