"""A joint graph cut in two at chosen values: what is saved there, everything else in the backward computed again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.fx
from torch.utils.checkpoint import CheckpointPolicy

from scoped_fn._graph import acts, copy_graph, fake_inputs, fake_value, output_values, storage_bytes
from scoped_fn.passes.levels import Halves

Nodes = set[torch.fx.Node]
KNOWN = ("aten", "prims", "scoped_fn")
ASKED_FOR = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def kept_bytes(forward: torch.fx.GraphModule, nodes: Iterable[torch.fx.Node]) -> int:
    """Returns the bytes of saved values of a graph, each memory once; without its arguments, which live anyway."""
    anyway = storage_bytes(fake_inputs(forward))
    held = storage_bytes([fake_value(node) for node in nodes])
    return sum(size for key, size in held.items() if key not in anyway)


class Cut:
    """What there is to choose from where a joint graph is cut.

    Attributes:
        gm: The joint graph.
        num_forward: How many of its outputs the forward computes.
        tangents: Placeholders of the backward.
        late: Nodes that only the backward can run, or that it has to: what acts and is not run in the forward.
        forward: The other nodes, in order.
        gradients: Late nodes that gradients depend on, or that act, in order.
        needed: Values of the forward that these take.
        fixed: Nodes that must not run again: those that act, those of other libraries' operators, which may, and those
            that a checkpoint policy saves.
        memory: For each forward node the memory that it takes to save it, and its bytes.
    """

    def __init__(self, gm: torch.fx.GraphModule, num_primals: int, halves: Halves, num_forward: int) -> None:
        """Takes a joint graph, and its halves as cut before, which say where what acts belongs."""
        self.gm, self.num_forward = gm, num_forward
        self.tangents = gm.graph.find_nodes(op="placeholder")[num_primals:]
        before, behind = ({node.name for node in half.graph.nodes} for half in halves)
        self.late: Nodes = set(self.tangents)
        for node in gm.graph.nodes:
            moved = acts(node) and node.name not in before and node.name in behind
            if moved or not self.late.isdisjoint(node.all_input_nodes):
                self.late.add(node)
        ends = [node for node in output_values(gm)[num_forward:] if isinstance(node, torch.fx.Node)]
        self.late.discard(gm.graph.output_node())
        acting = [node for node in self.late if acts(node)]
        wanted = _closure([*ends, *acting], ())
        self.forward = [node for node in gm.graph.nodes if node not in self.late and node.op != "output"]
        self.gradients = [node for node in gm.graph.nodes if node in self.late & wanted and node not in self.tangents]
        taken = {used for node in self.gradients for used in node.all_input_nodes}
        self.needed = {node for node in taken | set(ends) if node not in self.late}
        fixed = [node for node in self.forward if _runs_once(node)]
        anyway = storage_bytes(fake_inputs(gm))
        own = {node: storage_bytes(fake_value(node)).items() for node in self.forward}
        self.memory = {node: {k: size for k, size in found if k not in anyway} for node, found in own.items()}
        self.fixed = {each for node in fixed for each in ([node] if _is_tensor(node) else node.users)}

    def size(self, kept: Nodes) -> int:
        """Returns the bytes that saving these takes."""
        held = {key: size for node in kept for key, size in self.memory[node].items()}
        return sum(held.values())

    def recomputed(self, kept: Nodes) -> Nodes:
        """Returns the nodes that the backward runs again if `kept` is saved."""
        return {node for node in self.reached(kept) if node not in kept and _runs(node)}

    def reached(self, kept: Nodes) -> Nodes:
        """Returns the nodes that the backward takes or runs again if nothing but `kept` is saved."""
        return _closure(self.needed, kept | self.fixed)

    def cone(self, nodes: Nodes, kept: Nodes, again: Nodes) -> tuple[Nodes, Nodes]:
        """Returns what runs again besides `again` if `nodes` are not saved, and what must be saved for that."""
        rest = (kept - nodes) | again
        found = _closure(nodes, rest | self.fixed)
        return {each for each in found - rest - self.fixed if _runs(each)}, (found & self.fixed) - rest


def cut_at(cut: Cut, kept: Nodes) -> Halves:
    """Returns forward and backward graphs that save `kept`, and the placeholders that the backward takes."""
    used = cut.reached(kept)
    saved = [node for node in cut.forward if node in used and (node in kept or node.op == "placeholder")]
    return _forward(cut, saved), _backward(cut, saved)


def _forward(cut: Cut, saved: Sequence[torch.fx.Node]) -> torch.fx.GraphModule:
    gm = copy_graph(cut.gm)
    copies = dict(zip(cut.gm.graph.nodes, gm.graph.nodes, strict=True))
    outputs = output_values(gm)[: cut.num_forward]
    gm.graph.output_node().args = ((*outputs, *(copies[node] for node in saved)),)
    gm.graph.output_node().meta = {}
    for node in reversed(cut.gm.graph.nodes):
        if node in cut.late:
            gm.graph.erase_node(copies[node])
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _backward(cut: Cut, saved: Sequence[torch.fx.Node]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in [*saved, *cut.tangents]:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    gradients = output_values(cut.gm)[cut.num_forward :]
    for node in [*cut.gradients, *(end for end in gradients if isinstance(end, torch.fx.Node))]:
        for each in _in_order(node, copies):  # what runs again does so right before its first use
            copies[each] = graph.node_copy(each, lambda used: copies[used])
    graph.output(tuple(copies[end] if isinstance(end, torch.fx.Node) else None for end in gradients))
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


def _runs_once(node: torch.fx.Node) -> bool:
    """Returns whether a node must not run again: it acts, is asked to be saved, or nobody can look into it."""
    if acts(node) or node.meta.get("recompute") in ASKED_FOR:
        return True
    namespace = getattr(node.target, "namespace", None)  # of an operator
    return namespace not in (None, *KNOWN) and torch.Tag.pointwise not in getattr(node.target, "tags", ())


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(fake_value(node), torch.Tensor)


def _runs(node: torch.fx.Node) -> bool:
    return node.op not in ("placeholder", "get_attr")
