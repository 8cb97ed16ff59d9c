"""Forward and backward as one graph that takes no tangents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx

from scoped_fn._chain import split_joint
from scoped_fn._errors import SpecError
from scoped_fn._graph import Graph, copy_graph, fake_value, output_values
from scoped_fn._plan import Plan
from scoped_fn._structure import unflatten
from scoped_fn._torch.tensors import storage_id
from scoped_fn.passes.graph_pass import identity
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.lower import Joint
from scoped_fn.stages.partition import Split


def check_scalar(value: Any) -> Any:
    """Returns the value if it is a real scalar; raises `SpecError` if not."""
    if not isinstance(value, torch.Tensor) or value.shape != () or not value.is_floating_point():
        shown = (
            f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        )
        raise SpecError(
            f"Expected a scalar to differentiate, a floating point tensor of shape [], got {shown}. Reduce it."
        )
    return value


def only_value_differs(captured: Captured, has_aux: bool) -> Captured:
    """Returns the captured graph with every output but the value detached; checks that the value is a scalar."""
    gm = copy_graph(captured.graph.gm)
    values = output_values(gm)
    out = unflatten(captured.out_structure, [fake_value(node) for node in values[: captured.num_outputs]])
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise SpecError(
            f"Expected {captured.source.name} to return (value, aux), got a {type(out).__name__}. Drop has_aux."
        )
    check_scalar(out[0] if has_aux else out)
    with gm.graph.inserting_before(gm.graph.output_node()):
        for i, node in enumerate(values[1:], start=1):
            values[i] = gm.graph.call_method("detach", (node,))
            values[i].meta = dict(node.meta)
    gm.graph.output_node().args = (tuple(values),)
    gm.recompile()
    return replace(captured, graph=replace(captured.graph, gm=gm))


def one_graph(joint: Joint, plan: Plan) -> tuple[Joint, bool]:
    """Returns the joint graph without tangents, and whether the backend's whole-graph passes are still to come."""
    if joint.tangents and (plan.passes.acts_on_halves or _has_checkpoint(joint.graph)):
        _, split = split_joint(plan.settings, joint, replace(plan, passes=replace(plan.passes, joint=identity)))
        return replace(split.joint, graph=_with_unit_tangents(_merge(split), joint)), False
    return replace(joint, graph=_with_unit_tangents(joint.graph, joint)), True


def _has_checkpoint(graph: Graph) -> bool:
    return any("recompute" in node.meta for node in graph.gm.graph.nodes)


def _merge(split: Split) -> Graph:
    """Returns the forward followed by the backward, so that what the partition recomputes is recomputed."""
    joint, graph = split.joint, torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in joint.graph.gm.graph.find_nodes(op="placeholder"):
        copies[node] = graph.node_copy(node)
    primals = list(copies.values())[: joint.num_primals]
    tangents = list(copies.values())[joint.num_primals :]
    forward = _inline(graph, split.forward.gm, primals)
    grads = _inline(graph, split.backward.gm, [*forward[joint.num_forward :], *tangents])
    graph.output([*forward[: joint.num_forward], *grads])
    root = torch.nn.Module()
    for part in (split.forward.gm, split.backward.gm):
        for node in part.graph.find_nodes(op="get_attr"):
            setattr(root, str(node.target), getattr(part, str(node.target)))
    return replace(joint.graph, gm=torch.fx.GraphModule(root, graph))


def _inline(graph: torch.fx.Graph, gm: torch.fx.GraphModule, inputs: list[Any]) -> list[Any]:
    copies = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    return list(graph.graph_copy(gm.graph, copies))  # type: ignore[arg-type]


def _with_unit_tangents(graph: Graph, joint: Joint) -> Graph:
    """Returns the graph without tangents: one for the value, zero for anything else."""
    gm = copy_graph(graph.gm)
    nodes = gm.graph.find_nodes(op="placeholder")[joint.num_primals :]
    for node, index in zip(nodes, joint.tangents, strict=True):
        fake = node.meta["val"]
        with gm.graph.inserting_after(nodes[-1]):
            options = {"dtype": fake.dtype, "device": fake.device, "pin_memory": False}
            number = 1.0 if index == 0 else 0.0
            unit = gm.graph.call_function(torch.ops.aten.full.default, (list(fake.shape), number), options)
        unit.meta = {"val": fake}
        node.replace_all_uses_with(unit)
    for node in nodes:
        gm.graph.erase_node(node)
    separate_outputs(gm)
    gm.recompile()
    return Graph(gm, graph.inputs[: joint.num_primals], graph.outputs)


def separate_outputs(gm: torch.fx.GraphModule) -> None:
    """Copies each output that shares memory with an input or an earlier output, or with itself as expanded ones do."""
    seen = {storage_id(node.meta["val"]) for node in gm.graph.find_nodes(op="placeholder")}
    values = output_values(gm)
    with gm.graph.inserting_before(gm.graph.output_node()):
        for at, node in enumerate(values):
            fake = node.meta["val"]
            expanded = any(stride == 0 and size > 1 for size, stride in zip(fake.shape, fake.stride(), strict=True))
            if expanded or storage_id(fake) in seen or node in values[:at]:
                options: dict[str, Any] = {"memory_format": torch.contiguous_format} if expanded else {}
                values[at] = gm.graph.call_function(torch.ops.aten.clone.default, (node,), options)
                values[at].meta = {
                    "val": torch.empty_like(fake, memory_format=torch.contiguous_format) if expanded else fake
                }
            seen.add(storage_id(fake))
    gm.graph.output_node().args = (tuple(values),)
