"""The stage `apply`: any pass, on any artifact, at any point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch.fx

from scoped_fn._errors import SpecError
from scoped_fn._graph import Graph, copy_graph, output_values
from scoped_fn._overrides import known_overrides
from scoped_fn._torch.config import patched
from scoped_fn.passes.graph_pass import GraphPass, ReadConstants, identity, run_pass
from scoped_fn.stages.captured import captured_of, with_facts
from scoped_fn.state import CompilerState

Artifact = TypeVar("Artifact")


def apply(state: CompilerState, artifact: Artifact, graph_pass: GraphPass) -> tuple[CompilerState, Artifact]:
    """Returns the artifact with the pass applied to its graph; the one given keeps its own.

    Args:
        state: Any state; returned as it is. Its constants are what a pass made by `passes.reads_constants` reads.
        artifact: A `Captured`, `Joint` or `Inference`. For a `Split` use `apply_forward` and `apply_backward`.
        graph_pass: Takes a copy of the graph, returns a graph of the same inputs and outputs.

    Raises:
        SpecError: The pass returned something else. An exception of the pass itself comes through as it is.
    """
    return state, _apply_at(state, artifact, "graph", graph_pass)


def apply_forward(state: CompilerState, split: Artifact, graph_pass: GraphPass) -> tuple[CompilerState, Artifact]:
    """Returns the `Split` with the pass applied to its forward graph."""
    return state, _apply_at(state, split, "forward", graph_pass)


def apply_backward(state: CompilerState, split: Artifact, graph_pass: GraphPass) -> tuple[CompilerState, Artifact]:
    """Returns the `Split` with the pass applied to its backward graph."""
    return state, _apply_at(state, split, "backward", graph_pass)


def _apply_at(state: CompilerState, artifact: Artifact, field: str, graph_pass: GraphPass) -> Artifact:
    """Returns the artifact with the pass applied to one of its graphs."""
    if graph_pass is identity:
        return artifact
    graph: Any = getattr(artifact, field, None)
    if not isinstance(graph, Graph):
        raise SpecError(
            f"Expected an artifact with a {field!r} graph, got a {type(artifact).__name__}. "
            "Use apply on Captured, Joint or Inference, apply_forward and apply_backward on a Split."
        )
    constants = ReadConstants(state.constants)
    with patched(known_overrides(state, captured_of(artifact).owner)):
        gm = _checked(run_pass(graph_pass, copy_graph(graph.gm), constants), graph, graph_pass)
    changed: Artifact = replace(artifact, **{field: replace(graph, gm=gm)})  # type: ignore[type-var]
    return with_facts(changed, constants.read)


def _checked(gm: Any, graph: Graph, graph_pass: GraphPass) -> torch.fx.GraphModule:
    name = getattr(graph_pass, "__name__", repr(graph_pass))
    if not isinstance(gm, torch.fx.GraphModule):
        raise SpecError(
            f"Expected pass {name} to return a GraphModule, got {type(gm).__name__}. Return the changed graph."
        )
    counts = len(gm.graph.find_nodes(op="placeholder")), len(output_values(gm))
    if counts != (len(graph.inputs), len(graph.outputs)):
        raise SpecError(
            f"Expected pass {name} to keep {len(graph.inputs)} inputs and {len(graph.outputs)} outputs, "
            f"got {counts[0]} and {counts[1]}. Keep the signature of the graph."
        )
    gm.graph.lint()
    gm.recompile()
    return gm
