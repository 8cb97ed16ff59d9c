"""What fills the memory at the peak of a profile, and which module each node belongs to."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.fx

import scoped_fn as sf

Key = tuple[str, str]  # graph and name of a node
Result = tuple[torch.fx.Node, int]  # a node, and which of its tensors


@dataclass(frozen=True)
class Holding:
    """Memory that is in use at the peak.

    Attributes:
        name: The node that allocated it.
        graph: "forward", "backward" or "inference"; what a backward finds there from the forward was kept for it.
        module: The module that the node is from, see `modules_of`.
        bytes: How much.
    """

    name: str
    graph: str
    module: str
    bytes: int


@dataclass(frozen=True)
class Life:
    """Memory that a node allocates: how much, and the places of the first and the last node that use it."""

    name: str
    bytes: int
    first: int
    last: int


def held_at_peak(fn: sf.CompiledFn, profile: sf.Profile) -> tuple[Holding, ...]:
    """Returns what is in use while the peak node of a profile runs, the largest first.

    Args:
        fn: A compiled model.
        profile: Of a call like the one that it was compiled for: of another kind of call nothing is known.
    """
    peak, where = profile.peak_node, modules_of(fn)
    if peak is None:
        return ()
    allocated = {(node.graph, node.name): node.bytes for node in profile.nodes}
    found = []
    for graph, gm in _graphs(fn).items():
        names = [node.name for node in gm.graph.nodes]
        at = names.index(peak.name) if graph == peak.graph else len(names) - 1  # a backward finds what is kept
        found += [
            Holding(life.name, graph, where[graph, life.name], life.bytes)
            for life in _lives(gm, {name: allocated.get((graph, name), 0) for name in names})
            if life.first <= at <= life.last
        ]
        if graph == peak.graph:
            break
    return tuple(sorted(found, key=lambda each: -each.bytes))


def modules_of(fn: sf.CompiledFn) -> dict[Key, str]:
    """Returns for each node of a compiled model, by graph and name, the path of the innermost module that it is from.

    A node of the backward is from the module of what it differentiates. The path is empty for the model itself, and
    where nothing says so.
    """
    return {(graph, node.name): _module(node) for graph, gm in _graphs(fn).items() for node in gm.graph.nodes}


def _graphs(fn: sf.CompiledFn) -> dict[str, torch.fx.GraphModule]:
    if fn.backward_graph is None:
        return {"inference": fn.forward_graph.gm}
    return {"forward": fn.forward_graph.gm, "backward": fn.backward_graph.gm}


def _lives(gm: torch.fx.GraphModule, allocated: Mapping[str, int]) -> Iterator[Life]:
    """Yields what the nodes of a graph allocate; views prolong the life of what they look at."""
    sources: dict[torch.fx.Node, frozenset[Result]] = {}  # in whose memory a node's value lies
    first: dict[Result, int] = {}
    last: dict[Result, int] = {}
    for place, node in enumerate(gm.graph.nodes):
        used = frozenset[Result]().union(*(sources[each] for each in node.all_input_nodes))
        sources[node] = _results(node) if allocated[node.name] else used
        if node.target is operator.getitem:
            sources[node] = used & {(node.args[0], node.args[1])} or used
        first |= dict.fromkeys(sources[node] - used, place)
        last |= dict.fromkeys(sources[node] | used, place)
    for (node, index), place in first.items():
        value = node.meta["val"]
        value = value[index] if isinstance(value, tuple | list) else value
        yield Life(node.name, value.untyped_storage().nbytes(), place, last[node, index])


def _results(node: torch.fx.Node) -> frozenset[Result]:
    """Returns the tensors that a node computes: one, or several by their place."""
    value = node.meta["val"]
    several = enumerate(value if isinstance(value, tuple | list) else [value])
    return frozenset((node, index) for index, each in several if isinstance(each, torch.Tensor))


def _module(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [str(name) for name, _ in stack.values()]  # as "L['source'].call.blocks.0.attention"
    return paths[-1].partition(".call.")[2] if paths else ""
