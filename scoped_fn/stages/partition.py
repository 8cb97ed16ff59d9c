"""The stage `partition`: a joint graph to a forward and a backward graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx

from scoped_fn._backends import improve
from scoped_fn._errors import SpecError
from scoped_fn._fp8.recompute_codes import recompute_codes
from scoped_fn._graph import Graph, copy_graph, fake_inputs, output_values
from scoped_fn._overrides import known_overrides
from scoped_fn._torch.aot import partition_with_min_cut
from scoped_fn._torch.config import patched
from scoped_fn._torch.dynamo import compile_lock
from scoped_fn.passes.cut import kept_bytes
from scoped_fn.passes.levels import Halves, PartitionFn, SavedPass
from scoped_fn.passes.offload_saved import OFFLOADED
from scoped_fn.stages.lower import Joint
from scoped_fn.state import CompilerState


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
        """Bytes that are kept from forward to backward, each memory once.

        Parameters and inputs are not counted, which live anyway, nor what was moved to the host.
        """
        return self._bytes(offloaded=False)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that wait for the backward in the host's memory."""
        return self._bytes(offloaded=True)

    def _bytes(self, *, offloaded: bool) -> int:
        kept = output_values(self.forward.gm)[self.joint.num_forward :]
        nodes = [node for node in kept if (OFFLOADED in node.meta) == offloaded]
        return kept_bytes(self.forward.gm, nodes)


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
    with compile_lock, patched(known_overrides(state, joint.captured.owner)):
        gm = improve(joint.backend, copy_graph(joint.graph.gm), torch_rng=joint.captured.rng == "torch")
        gm = recompute_codes(gm, joint.num_primals)
        values = fake_inputs(gm)
        primals, tangents = values[: joint.num_primals], values[joint.num_primals :]
        halves = (partition_fn or partition_with_min_cut)(gm, primals, tangents, joint.num_forward)
    return state, _split(joint, halves)


def apply_saved(state: CompilerState, split: Split, saved_pass: SavedPass | None) -> tuple[CompilerState, Split]:
    """Returns the split with another way for values to get from forward to backward.

    Args:
        state: Any state; returned as it is.
        split: A partitioned graph.
        saved_pass: `(forward, backward, num_forward) -> (forward, backward)` on copies of the graphs; None for none.
    """
    if saved_pass is None:
        return state, split
    joint = split.joint
    with patched(known_overrides(state, joint.captured.owner)):
        halves = saved_pass(copy_graph(split.forward.gm), copy_graph(split.backward.gm), joint.num_forward)
    return state, _split(joint, halves)


def _split(joint: Joint, halves: Halves) -> Split:
    """Returns the split into two graphs; raises `SpecError` if they are no halves of the joint graph."""
    inputs, outputs = joint.graph.inputs, joint.graph.outputs
    if not (isinstance(halves, tuple) and [isinstance(gm, torch.fx.GraphModule) for gm in halves] == [True, True]):
        raise SpecError(f"Expected (forward, backward) as two GraphModules, got {halves!r}. Return both graphs.")
    forward, backward = halves
    for gm in halves:
        gm.graph.lint()
        gm.recompile()
    taken, given = len(fake_inputs(forward)), len(output_values(backward))
    grads = len(outputs) - joint.num_forward
    if (taken, given) != (joint.num_primals, grads):
        raise SpecError(
            f"Expected a forward graph of {joint.num_primals} inputs and a backward graph of {grads} gradients, got "
            f"{taken} and {given}. Return (forward, backward)."
        )
    saved = _saved_names(forward, backward, joint.num_forward, len(inputs) - joint.num_primals)
    return Split(
        joint,
        Graph(forward, inputs[: joint.num_primals], (*outputs[: joint.num_forward], *saved)),
        Graph(backward, (*saved, *inputs[joint.num_primals :]), outputs[joint.num_forward :]),
        saved,
    )


def _saved_names(
    forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, num_forward: int, num_tangents: int
) -> tuple[str, ...]:
    """Returns the names of the saved values; both graphs list them in the same order."""
    saved = tuple(node.name for node in output_values(forward)[num_forward:])
    taken = len(backward.graph.find_nodes(op="placeholder")) - num_tangents
    if len(saved) != taken:
        raise SpecError(
            f"Expected a backward graph that takes the {len(saved)} values that the forward graph saves, got {taken}. "
            "A partition function returns a forward that ends in what its backward begins with."
        )
    return saved
