"""Short ways to look at graphs and to change them."""

from __future__ import annotations

from typing import Any

import torch

import scoped_fn as sf


def split_of(fn: sf.CompiledFn) -> Any:
    """Forward and backward of a function that was compiled for training."""
    assert fn._split is not None
    return fn._split


def saved_bytes(fn: sf.CompiledFn) -> int:
    """Bytes that live from forward to backward, by the compiled function's own count."""
    return int(split_of(fn).saved_bytes)


def backward_of(fn: sf.CompiledFn) -> torch.fx.GraphModule:
    assert fn.backward_graph is not None
    return fn.backward_graph.gm


def returned(gm: torch.fx.GraphModule) -> list[Any]:
    """What a graph returns."""
    values: Any = gm.graph.output_node().args[0]
    return list(values)


def calls(gm: torch.fx.GraphModule, target: Any) -> int:
    """How often a graph calls an operation."""
    return len(gm.graph.find_nodes(op="call_function", target=target))


def passes_at(level: str, graph_pass: Any) -> sf.Passes:
    """Passes of one level."""
    options: Any = {level: graph_pass}
    return sf.Passes(**options)


def times(factor: float, gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with the first of its results multiplied."""
    gm = sf.copy_graph(gm)
    values = returned(gm)
    with gm.graph.inserting_before(gm.graph.output_node()):
        made = gm.graph.call_function(torch.ops.aten.mul.Scalar, (values[0], factor))
    made.meta = dict(values[0].meta)
    gm.graph.output_node().args = ((made, *values[1:]),)
    gm.recompile()
    return gm


def sine_pass(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A pass on the captured graph that everyone can see in the numbers: sine for hyperbolic tangent."""
    gm = sf.copy_graph(gm)
    for node in gm.graph.find_nodes(op="call_function", target=torch.tanh):
        node.target = torch.sin
    gm.recompile()
    return gm
