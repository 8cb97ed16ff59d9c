"""The stage `partition`: a joint graph to a forward and a backward graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from scoped_fn._backends import improve
from scoped_fn._graph import Graph, copy_graph, fake_inputs, output_values
from scoped_fn._torch import partition_with_min_cut, storage_id
from scoped_fn.stages.lower import Joint
from scoped_fn.state import CompilerState

PartitionFn = Callable[
    [torch.fx.GraphModule, Sequence[Any], Sequence[Any], int], tuple[torch.fx.GraphModule, torch.fx.GraphModule]
]


@dataclass(frozen=True, eq=False)
class Split:
    """Forward and backward as two ATen graphs.

    Attributes:
        joint: Where they came from.
        forward: Placeholders: those of the joint graph but for the tangents. Outputs: the model's outputs, the new
            buffers, then what is saved.
        backward: Placeholders: what is saved, then the tangents. Outputs: the gradients.
        saved: Names of what the forward keeps for the backward.
    """

    joint: Joint
    forward: Graph
    backward: Graph
    saved: tuple[str, ...]

    def __str__(self) -> str:
        return f"forward {self.forward}\nbackward {self.backward}"

    @property
    def saved_bytes(self) -> int:
        """Bytes that live from forward to backward, parameters and inputs not counted: they live anyway."""
        kept = output_values(self.forward.gm)[self.joint.num_forward :]
        values = [node.meta["val"] for node in kept if node.op != "placeholder"]
        return sum(value.numel() * value.element_size() for value in values)


def partition(
    state: CompilerState, joint: Joint, partition_fn: PartitionFn | None = None
) -> tuple[CompilerState, Split]:
    """Returns forward and backward graphs, and what is saved between them.

    Args:
        state: Any state; returned as it is.
        joint: A joint graph.
        partition_fn: `(gm, primals, tangents, num_forward_outputs) -> (forward, backward)` on a copy of the graph. By
            default a minimum cut that recomputes what is cheap, and what checkpoint regions ask for.
    """
    gm = improve(joint.backend, copy_graph(joint.graph.gm), torch_rng=joint.captured.rng == "torch")
    values = fake_inputs(gm)
    primals, tangents = values[: joint.num_primals], values[joint.num_primals :]
    forward, backward = (partition_fn or partition_with_min_cut)(gm, primals, tangents, joint.num_forward)
    _protect_saved(forward, joint.num_forward)
    saved = tuple(node.name for node in output_values(forward)[joint.num_forward :])
    split = Split(
        joint,
        Graph(forward, joint.graph.inputs[: joint.num_primals], (*joint.graph.outputs[: joint.num_forward], *saved)),
        Graph(backward, (*saved, *joint.graph.inputs[joint.num_primals :]), joint.graph.outputs[joint.num_forward :]),
        saved,
    )
    return state, split


def _protect_saved(forward: torch.fx.GraphModule, num_forward: int) -> None:
    """Clones an output that shares memory with a saved tensor without being it.

    Autograd notices an in-place change of a saved output, but not of a compiled view of it.
    """
    values = output_values(forward)
    saved = {storage_id(node.meta["val"]): node for node in values[num_forward:]}
    for at, node in enumerate(values[:num_forward]):
        other = saved.get(storage_id(node.meta["val"])) if isinstance(node, torch.fx.Node) else None
        if other is not None and other is not node:
            with forward.graph.inserting_before(forward.graph.output_node()):
                values[at] = forward.graph.call_function(torch.ops.aten.clone.default, (node,))
            values[at].meta = {"val": node.meta["val"].clone()}
    forward.graph.output_node().args = (tuple(values),)
    forward.recompile()
