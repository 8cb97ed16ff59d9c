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
from scoped_fn._graph import copy_graph, fake_value, output_values, storage_bytes
from scoped_fn._torch.aot import partition_with_min_cut
from scoped_fn.passes.cut import Cut, Nodes, cut_at, kept_bytes
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
        fraction: 0 <= fraction <= 1. Where it cannot be reached, because random numbers have to be saved, as little as
            possible is, with a warning.

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
    kept = output_values(halves[0])[num_forward:]
    budget = fraction * kept_bytes(halves[0], kept)
    if fraction == 1:
        return halves
    cut, names = Cut(joint, len(primals), halves, num_forward), {node.name for node in kept}
    measured = profile.seconds_by_name() if profile is not None else {}
    cost = {node: measured.get(node.name, _estimate(node)) for node in cut.forward}
    saved = {node for node in cut.forward if node.name in names and node.op != "placeholder"}
    return cut_at(cut, _within(cut, saved, budget, cost))


def _within(cut: Cut, saved: Nodes, budget: float, cost: dict[torch.fx.Node, float]) -> Nodes:
    """Returns what to save, so that it fits; as little as possible where that cannot be."""
    kept = _drop_cheapest(cut, saved | (cut.fixed & cut.reached(saved)), budget, cost)
    if cut.size(kept) > budget:
        least = cut.fixed & cut.reached(set())
        kept = min(kept, least, key=cut.size)
    if cut.size(kept) > budget:
        warnings.warn(
            f"Expected at most {budget:,.0f} saved bytes, got {cut.size(kept):,}: the rest cannot run again, because "
            "it is drawn at random or has to be saved. Raise the fraction.",
            stacklevel=2,
        )
    return kept


def _drop_cheapest(cut: Cut, kept: Nodes, budget: float, cost: dict[torch.fx.Node, float]) -> Nodes:
    """Returns what is left to save once values have been dropped, the cheapest for their bytes first, to fit."""
    again, groups = cut.recomputed(kept), _by_memory(cut, kept - cut.fixed)
    heap = [(0.0, at) for at in range(len(groups))]
    while heap and cut.size(kept) > budget:
        known, at = heapq.heappop(heap)
        new, needed = cut.cone(groups[at], kept, again)
        without = (kept - groups[at]) | needed
        gain = cut.size(kept) - cut.size(without)
        price = sum(cost[each] for each in new) / gain if gain > 0 else float("inf")
        if heap and heap[0][0] < price < float("inf") and price > known:
            heapq.heappush(heap, (price, at))  # dearer than when it was looked at: its turn comes later
        elif gain > 0:
            kept, again = without, again | new
    return kept


def _by_memory(cut: Cut, nodes: Nodes) -> list[Nodes]:
    """Returns the nodes in groups that share memory, which is free once the whole group is dropped."""
    groups: dict[int, Nodes] = {}
    for node in cut.forward:
        if node in nodes and cut.memory[node]:
            groups.setdefault(next(iter(cut.memory[node])), set()).add(node)
    return list(groups.values())


def _estimate(node: torch.fx.Node) -> float:
    """Returns the seconds of a node that no profile knows: by the memory it touches, at 10 GB/s."""
    return 1e-10 * sum(storage_bytes([fake_value(each) for each in (node, *node.all_input_nodes)]).values())
