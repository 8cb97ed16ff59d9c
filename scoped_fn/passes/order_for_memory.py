"""`order_for_memory`: the same operations in an order that needs less memory at its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.fx

from scoped_fn._graph import acts, fake_value, storage_bytes
from scoped_fn.passes.guided import GuidedPass
from scoped_fn.passes.levels import Passes

if TYPE_CHECKING:
    from scoped_fn._profile import Profile

Nodes = Sequence[torch.fx.Node]
Needs = dict[torch.fx.Node, set[torch.fx.Node]]


def order_for_memory() -> OrderForMemory:
    """Returns the pass that reorders the forward and the backward graph so that their peak memory falls.

    List scheduling, once from the first operation on and once from the last one back: of those that can run, the next
    is one that takes no more memory than it frees. The order with the lowest peak is taken; it may be the given one.
    Sizes are those of the graph, so no profile is needed. Inductor orders its kernels itself, from this order on.

    Example:
        >>> order_for_memory()
        OrderForMemory()
    """
    return OrderForMemory()


@dataclass(frozen=True)
class OrderForMemory(GuidedPass):
    """What `order_for_memory` returns."""

    name: ClassVar[str] = "order_for_memory"
    conflicts: ClassVar[frozenset[str]] = frozenset({"order_for_memory"})

    def passes(self, profile: Profile | None) -> Passes:
        """Returns the same pass for both graphs."""
        return Passes(forward=ordered, backward=ordered)


def ordered(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph in the order of the lowest peak."""
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    if any(_writes(node) for node in nodes):
        return gm  # an operation that changes its argument in place has to stay where it is
    memory, needs = Memory(gm), _needs(nodes)
    found = [nodes, _from_the_start(nodes, needs, memory), _from_the_end(nodes, needs, memory)]
    best = min(found, key=memory.peak)  # the first of equals: the given order
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in [*gm.graph.find_nodes(op="placeholder"), *best, gm.graph.output_node()]:
        copies[node] = graph.node_copy(node, lambda used: copies[used])
    return torch.fx.GraphModule(gm, graph, class_name=type(gm).__name__)


class Memory:
    """The memory that the operations of a graph take, beyond its inputs.

    Attributes:
        storages: Node -> the storages of its values, and their bytes.
        outputs: Storages that the graph returns.
        makers: Storage -> the node that allocates it.
    """

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        inputs = {key for node in gm.graph.find_nodes(op="placeholder") for key in storage_bytes(fake_value(node))}
        self.storages = {
            node: {k: b for k, b in storage_bytes(fake_value(node)).items() if k not in inputs}
            for node in gm.graph.nodes
        }
        self.outputs = {key for node in gm.graph.output_node().all_input_nodes for key in self.storages[node]}
        self.makers: dict[int, torch.fx.Node] = {}
        for node in gm.graph.nodes:
            for key in self.storages[node]:
                self.makers.setdefault(key, node)

    def touched(self, node: torch.fx.Node) -> dict[int, int]:
        """Returns the storages that a node reads or makes, and their bytes."""
        return {key: size for each in [node, *node.all_input_nodes] for key, size in self.storages[each].items()}

    def made(self, node: torch.fx.Node) -> dict[int, int]:
        """Returns the storages that a node allocates."""
        return {key: size for key, size in self.storages[node].items() if self.makers[key] is node}

    def uses(self, nodes: Nodes) -> Counter[int]:
        """Returns how many of the nodes touch each storage; what the graph returns is never used up."""
        return Counter([*self.outputs, *(key for node in nodes for key in self.touched(node))])

    def peak(self, order: Nodes) -> int:
        """Returns the most bytes that are in use at once in an order."""
        left, now, peak = self.uses(order), 0, 0
        for node in order:
            now += sum(self.made(node).values())
            peak = max(peak, now)  # while it runs, what it frees is still there
            left.subtract(self.touched(node).keys())
            now -= sum(size for key, size in self.touched(node).items() if not left[key])
        return peak


def _from_the_start(nodes: Nodes, needs: Needs, memory: Memory) -> list[torch.fx.Node]:
    """Returns the order in which what takes no more memory than it frees runs first, else what came first."""
    place, left = {node: i for i, node in enumerate(nodes)}, memory.uses(nodes)

    def key(node: torch.fx.Node) -> tuple[bool, int]:
        freed = sum(size for key, size in memory.touched(node).items() if left[key] == 1)
        return sum(memory.made(node).values()) > freed, place[node]

    return _schedule(needs, key, lambda node: left.subtract(memory.touched(node).keys()))


def _from_the_end(nodes: Nodes, needs: Needs, memory: Memory) -> list[torch.fx.Node]:
    """Returns the same from the last node to the first: what makes more than it keeps alive runs last."""
    place, alive = {node: i for i, node in enumerate(nodes)}, set(memory.outputs)

    def key(node: torch.fx.Node) -> tuple[bool, int]:
        kept = sum(size for key, size in memory.touched(node).items() if key not in alive | memory.made(node).keys())
        return kept > sum(memory.made(node).values()), -place[node]

    def take(node: torch.fx.Node) -> None:
        alive.update(memory.touched(node))
        alive.difference_update(memory.made(node))

    users: Needs = {node: set() for node in nodes}
    for node, taken in needs.items():
        for each in taken:
            users[each].add(node)
    return _schedule(users, key, take)[::-1]


def _schedule(
    needs: Needs, key: Callable[[torch.fx.Node], Any], take: Callable[[torch.fx.Node], None]
) -> list[torch.fx.Node]:
    """Returns all nodes, each after those it needs; of those that are ready, the one with the least key is next."""
    left = {node: len(taken) for node, taken in needs.items()}
    frees: dict[torch.fx.Node, list[torch.fx.Node]] = {node: [] for node in needs}
    for node, taken in needs.items():
        for each in taken:
            frees[each].append(node)
    ready, order = [node for node, count in left.items() if not count], []
    while ready:
        node = min(ready, key=key)
        ready.remove(node)
        order.append(node)
        take(node)
        for each in frees[node]:
            left[each] -= 1
            if not left[each]:
                ready.append(each)
    return order


def _needs(nodes: Nodes) -> Needs:
    """Returns which nodes each has to run after: those it takes, and for those that act the last that did."""
    every, needs = set(nodes), {}
    last: torch.fx.Node | None = None
    for node in nodes:
        needs[node] = every.intersection(node.all_input_nodes)
        if acts(node):
            needs[node] |= {last} if last is not None else set()
            last = node
    return needs


def _writes(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op in ("call_method", "call_module") or (schema is not None and schema.is_mutable)
