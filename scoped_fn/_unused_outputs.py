"""Backward graphs for losses that use only some of a function's outputs.

A cotangent of zeros would be wrong: zero times an infinite local derivative is NaN. Eager does not run what leads to an
unused output, and neither do we. A backward is linear in its tangents, so a node that depends on unused tangents alone
is zero, and is left out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from scoped_fn._graph import Graph, output_values

ADD = torch.ops.aten.add.Tensor


def without_tangents(backward: Graph, num_saved: int, unused: frozenset[int]) -> tuple[Graph, tuple[int, ...]]:
    """Returns the backward graph without some tangents, and which of its gradients are left.

    Args:
        backward: Placeholders: saved values, then tangents.
        num_saved: How many saved values there are.
        unused: The tangents to leave out, counted from 0.
    """
    graph, copies = torch.fx.Graph(), {}
    sources: dict[torch.fx.Node, frozenset[int]] = {}
    names: list[str] = []
    for at, node in enumerate(backward.gm.graph.nodes):
        if node.op == "placeholder":
            sources[node] = frozenset() if at < num_saved else frozenset({at - num_saved})
            if not sources[node] & unused:
                copies[node] = graph.node_copy(node)
                names.append(backward.inputs[at])
        elif node.op != "output":
            sources[node] = frozenset().union(*(sources[used] for used in node.all_input_nodes))
            if not _is_zero(sources[node], unused):
                copies[node] = _copy(graph, node, copies)
    values = output_values(backward.gm)
    left = tuple(i for i, node in enumerate(values) if node is not None and not _is_zero(sources[node], unused))
    graph.output(tuple(copies[values[i]] for i in left))
    idle = {copies[node]: None for node in copies if node.op != "placeholder" and node.users}
    for node in reversed(idle):
        if not node.users:  # it led to what is left out, so it does not run, also where it draws
            graph.erase_node(node)
    gm = torch.fx.GraphModule(backward.gm, graph)
    return Graph(gm, tuple(names), tuple(backward.outputs[i] for i in left)), left


def _is_zero(sources: frozenset[int], unused: frozenset[int]) -> bool:
    return bool(sources) and sources <= unused


def _copy(graph: torch.fx.Graph, node: torch.fx.Node, copies: dict[torch.fx.Node, torch.fx.Node]) -> torch.fx.Node:
    """Copies a node; inputs that are zero, which have no copy, drop out of sums and are made elsewhere."""
    missing = [used for used in node.all_input_nodes if used not in copies]
    if missing and node.target is ADD and not node.kwargs:
        kept = next((used for used in node.all_input_nodes if used in copies), None)
        if kept is not None and _same(kept.meta["val"], node.meta["val"]):
            return copies[kept]
    zeros = {used: _zeros(graph, used.meta["val"]) for used in missing}
    return graph.node_copy(node, lambda used: zeros[used] if used in zeros else copies[used])


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype


def _zeros(graph: torch.fx.Graph, fake: Any) -> torch.fx.Node:
    options = {"dtype": fake.dtype, "device": fake.device, "pin_memory": False}
    made = graph.call_function(torch.ops.aten.full.default, (list(fake.shape), 0), options)
    made.meta = {"val": fake}
    return made
