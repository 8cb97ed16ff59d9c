"""The stages `compile_forward`, `compile_backward` and `compile_inference`: a graph to code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from scoped_fn._backends import Backend, Code, GraphRole, Strides, make_code
from scoped_fn._graph import Graph
from scoped_fn._overrides import known_overrides
from scoped_fn._torch.config import patched
from scoped_fn._torch.dynamo import compile_lock
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.lower import Inference
from scoped_fn.stages.partition import Split
from scoped_fn.state import CompilerState, FrozenDict


@dataclass(frozen=True, eq=False)
class Compiled:
    """Code of one graph.

    Attributes:
        graph: The graph.
        code: Takes a list of tensors in the order of the graph's inputs, which it may clear; returns its outputs.
        input_strides: Strides of the first inputs, where they are not the graph's own.
        output_strides: Strides of the outputs, where the backend chose others than the graph's own.
        again: Compiles another graph the same way.
    """

    graph: Graph
    code: Code
    input_strides: Strides
    output_strides: Strides
    again: Callable[[Graph], Compiled]

    def __repr__(self) -> str:
        return f"Compiled({self.graph!r})"


def compile_forward(state: CompilerState, split: Split, compiler: Backend = "eager") -> tuple[CompilerState, Compiled]:
    """Returns code of the forward graph, compiled in the calling thread.

    Args:
        state: Any state; returned as it is. The overrides that it holds for the owner are in effect.
        split: A partitioned graph, lowered for the same backend.
        compiler: "inductor", "eager", or `(gm, example_inputs) -> callable`, whose exceptions come through.
    """
    role = GraphRole(
        split.joint.num_forward, torch_rng=split.joint.captured.rng == "torch", lowered_for=split.joint.backend
    )
    return state, compile_graph(split.forward, compiler, role, overrides=_held(state, split.joint.captured))


def compile_backward(
    state: CompilerState, split: Split, compiler: Backend = "eager", *, forward: Compiled | None = None
) -> tuple[CompilerState, Compiled]:
    """Returns code of the backward graph.

    Args:
        state: Any state; returned as it is.
        split: A partitioned graph.
        compiler: As in `compile_forward`.
        forward: The compiled forward: the backward then takes saved values in the memory layout that the forward's
            compiler chose. Without it they are copied into the graph's own layout at each call, where they differ.
    """
    strides = forward.output_strides[split.joint.num_forward :] if forward else ()
    role = GraphRole(
        0, is_backward=True, torch_rng=split.joint.captured.rng == "torch", lowered_for=split.joint.backend
    )
    return state, compile_graph(split.backward, compiler, role, strides, _held(state, split.joint.captured))


def compile_inference(
    state: CompilerState, inference: Inference, compiler: Backend = "eager"
) -> tuple[CompilerState, Compiled]:
    """Returns code of the inference graph. Arguments are those of `compile_forward`."""
    rng = inference.captured.rng == "torch"
    role = GraphRole(
        len(inference.graph.outputs), is_inference=True, torch_rng=rng, whole=True, lowered_for=inference.backend
    )
    return state, compile_graph(inference.graph, compiler, role, overrides=_held(state, inference.captured))


def compile_graph(
    graph: Graph,
    compiler: Backend,
    role: GraphRole,
    input_strides: Strides = (),
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Compiled:
    """Returns code of any graph, compiled under these settings; one compilation at a time in a process."""
    with compile_lock, patched(overrides):
        code, output_strides = make_code(compiler, graph.gm, role, input_strides)

    def again(other: Graph) -> Compiled:
        return compile_graph(other, compiler, role, input_strides, overrides)

    return Compiled(graph, code, input_strides, output_strides, again)


def _held(state: CompilerState, captured: Captured) -> FrozenDict[str, Any]:
    return known_overrides(state, captured.owner)
