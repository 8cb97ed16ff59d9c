"""A joint graph cut in two at chosen values: what is saved there, everything else in the backward computed again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx
from torch.utils.checkpoint import CheckpointPolicy

from scoped_fn._graph import copy_graph, draws, fake_value, output_values
from scoped_fn.passes.levels import Halves

Nodes = set[torch.fx.Node]
ASKED_FOR = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def node_bytes(node: torch.fx.Node) -> int:
    """Returns the bytes of a node's value if it is a tensor that the graph computes."""
    value = fake_value(node)
    return value.numel() * value.element_size() if node.op != "placeholder" and _is_tensor(node) else 0


class Cut:
    """What there is to choose from where a joint graph is cut.

    Attributes:
        gm: The joint graph.
        num_forward: How many of its outputs the forward computes.
        tangents: Placeholders of the backward.
        forward: Nodes that do not depend on tangents, in order.
        gradients: Nodes that do, and that gradients depend on, in order.
        needed: Values of the forward that these take.
        fixed: Nodes that must not run again: random ones, and those that a checkpoint policy saves.
    """

    def __init__(self, gm: torch.fx.GraphModule, num_primals: int, num_forward: int) -> None:
        self.gm, self.num_forward = gm, num_forward
        self.tangents = gm.graph.find_nodes(op="placeholder")[num_primals:]
        late: Nodes = set(self.tangents)
        for node in gm.graph.nodes:
            if not late.isdisjoint(node.all_input_nodes):
                late.add(node)
        ends = [node for node in output_values(gm)[num_forward:] if isinstance(node, torch.fx.Node)]
        wanted = _closure(ends, ())
        self.forward = [node for node in gm.graph.nodes if node not in late and node.op != "output"]
        self.gradients = [node for node in gm.graph.nodes if node in late & wanted and node not in self.tangents]
        taken = {used for node in self.gradients for used in node.all_input_nodes}
        self.needed = {node for node in taken | set(ends) if node not in late}
        fixed = [node for node in self.forward if draws(node) or node.meta.get("recompute") in ASKED_FOR]
        self.fixed = {each for node in fixed for each in ([node] if _is_tensor(node) else node.users)}

    def recomputed(self, kept: Nodes) -> Nodes:
        """Returns the nodes that the backward runs again if `kept` is saved."""
        return {node for node in self.reached(kept) if node not in kept and _runs(node)}

    def reached(self, kept: Nodes) -> Nodes:
        """Returns the nodes that the backward takes or runs again if nothing but `kept` is saved."""
        return _closure(self.needed, kept | self.fixed)

    def cone(self, node: torch.fx.Node, kept: Nodes, again: Nodes) -> tuple[Nodes, Nodes]:
        """Returns what runs again besides `again` if `node` is not saved, and what must be saved for that."""
        rest = (kept - {node}) | again
        found = _closure([node], rest | self.fixed)
        return {each for each in found - rest - self.fixed if _runs(each)}, (found & self.fixed) - rest


def cut_at(cut: Cut, kept: Nodes) -> Halves:
    """Returns forward and backward graphs that save `kept`, and the placeholders that the backward takes."""
    used = cut.reached(kept)
    saved = [node for node in cut.forward if node in used and (node in kept or node.op == "placeholder")]
    return _forward(cut, saved), _backward(cut, saved)


def _forward(cut: Cut, saved: list[torch.fx.Node]) -> torch.fx.GraphModule:
    gm = copy_graph(cut.gm)
    copies = dict(zip(cut.gm.graph.nodes, gm.graph.nodes, strict=True))
    outputs = output_values(gm)[: cut.num_forward]
    gm.graph.output_node().args = ((*outputs, *(copies[node] for node in saved)),)
    gm.graph.output_node().meta = {}
    gm.graph.eliminate_dead_code()
    for node in cut.tangents:
        gm.graph.erase_node(copies[node])
    gm.recompile()
    return gm


def _backward(cut: Cut, saved: list[torch.fx.Node]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in [*saved, *cut.tangents]:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    gradients = output_values(cut.gm)[cut.num_forward :]
    for node in [*cut.gradients, *(end for end in gradients if isinstance(end, torch.fx.Node))]:
        for each in _in_order(node, copies):  # what runs again does so right before its first use
            copies[each] = graph.node_copy(each, lambda used: copies[used])
    graph.output(tuple(copies.get(end) for end in gradients))
    return torch.fx.GraphModule(cut.gm, graph)


def _in_order(node: torch.fx.Node, known: dict[torch.fx.Node, torch.fx.Node]) -> list[torch.fx.Node]:
    """Returns a node after everything that it takes and that is not known, in an order that can run."""
    order: dict[torch.fx.Node, None] = {}
    stack = [(node, False)]
    while stack:
        each, ready = stack.pop()
        if ready:
            order[each] = None
        elif each not in known and each not in order:
            stack.append((each, True))
            stack += [(used, False) for used in reversed(each.all_input_nodes)]
    return list(order)


def _closure(ends: Iterable[torch.fx.Node], until: Iterable[torch.fx.Node]) -> Nodes:
    """Returns the ends and all that they depend on, not looking beyond `until`."""
    found: Nodes = set()
    border, stack = set(until), list(ends)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [] if node in border else node.all_input_nodes
    return found


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(fake_value(node), torch.Tensor)


def _runs(node: torch.fx.Node) -> bool:
    return node.op not in ("placeholder", "get_attr")
