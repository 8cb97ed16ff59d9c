"""Forward and backward by AOTAutograd: export, and partition."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.effects import with_effects

from scoped_fn._torch.tensors import fake_mode_of

TOKENS = (ForwardTokenAOTInput, BackwardTokenAOTInput, ForwardTokenAOTOutput, BackwardTokenAOTOutput)


@dataclass(frozen=True)
class ExportedGraph:
    """An ATen graph and what each of its inputs and outputs means.

    Attributes:
        gm: Flat: tensors in, list of tensors out. Training graphs have placeholders `primals_*` then `tangents_*`.
        tangents: For each tangent placeholder, the index of the output it belongs to, or ("buffer", input index).
        mutated: Input indices whose new values come first among the outputs.
        num_outputs: How many of the function's own outputs follow.
        grads: For each gradient output, the input index it belongs to; None where there is no gradient.
    """

    gm: torch.fx.GraphModule
    tangents: tuple[Any, ...]
    mutated: tuple[int, ...]
    num_outputs: int
    grads: tuple[int | None, ...]


def export_with_aot(module: torch.nn.Module, fakes: Sequence[torch.Tensor], decompositions: Any) -> ExportedGraph:
    """Returns the functional ATen graph of a flat module: joint if gradients are wanted, else forward only.

    Gradients are wanted if grad mode is on and a fake input requires them. The backward is traced outside autocast,
    as eager's backward runs.
    """
    with ExitStack() as stack, functorch_config.patch(backward_pass_autocast="off"):
        joint = aot_export_joint_with_descriptors(stack, module, tuple(fakes), decompositions=decompositions)
        gm = _without_tokens(joint.graph_module)
    gm.graph.set_codegen(torch.fx.graph.CodeGen())
    gm.recompile()
    output = gm.graph.output_node()
    kinds = list(output.meta["desc"])
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    mutated = tuple(_plain_index(d.mutated_input) for d in kinds if isinstance(d, InputMutationAOTOutput))
    num_outputs = sum(isinstance(d, PlainAOTOutput) for d in kinds)
    start = len(mutated) + num_outputs
    unknown = [d for d in kinds[:start] if not isinstance(d, (InputMutationAOTOutput, PlainAOTOutput))]
    unknown += [d for d in kinds[start:] if d is not None and not isinstance(d, GradAOTOutput)]
    if unknown:
        raise RuntimeError(f"Expected only outputs, mutations and gradients in the joint graph, got {unknown}.")
    grads = tuple(_grad_index(d, v) for d, v in zip(kinds[start:], values[start:], strict=True))
    return ExportedGraph(gm, tuple(_tangents(gm)), mutated, num_outputs, grads)


def _without_tokens(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph with operations that have effects as plain ones, not ordered by tokens. Edits it."""
    for node in list(gm.graph.nodes):
        if node.target is with_effects:
            _, op, *args = node.args
            with gm.graph.inserting_before(node):
                plain = gm.graph.call_function(op, tuple(args), dict(node.kwargs))
            values = tuple(node.meta["val"])[1:]
            plain.meta = {**node.meta, "val": values if len(op._schema.returns) > 1 else values[0]}
            for user in list(node.users):
                index = user.args[1]
                if index > 0 and len(op._schema.returns) > 1:
                    user.args = (plain, index - 1)
                elif index > 0:
                    user.replace_all_uses_with(plain)
    output = gm.graph.output_node()
    kept = [
        pair
        for pair in zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
        if not isinstance(pair[1], TOKENS)
    ]
    output.args = ([value for value, _ in kept],)
    output.meta["desc"] = [kind for _, kind in kept]
    for node in reversed(list(gm.graph.nodes)):
        tokens = node.op == "placeholder" and isinstance(node.meta.get("desc"), TOKENS)
        if not node.users and (tokens or node.target in (with_effects, operator.getitem)):
            gm.graph.erase_node(node)
    return gm


def _grad_index(kind: Any, value: Any) -> int | None:
    if value is None or kind is None:
        return None
    return _plain_index(kind.grad_of)


def _plain_index(kind: Any) -> int:
    if not isinstance(kind, (PlainAOTInput, PlainAOTOutput)):
        raise RuntimeError(f"Expected a plain input or output of the graph, got {kind}.")
    return kind.idx


def _tangents(gm: torch.fx.GraphModule) -> Iterator[Any]:
    for node in gm.graph.find_nodes(op="placeholder"):
        kind = node.meta.get("desc")
        if isinstance(kind, TangentAOTInput):
            of: Any = kind.output
            mutation = isinstance(of, InputMutationAOTOutput)
            yield ("buffer", _plain_index(of.mutated_input)) if mutation else _plain_index(of)


def partition_with_min_cut(
    joint: torch.fx.GraphModule, primals: Sequence[Any], tangents: Sequence[Any], num_fwd_outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Returns forward and backward graphs; recomputes what is cheap or in a checkpoint region. Edits `joint`."""
    mode = fake_mode_of([*primals, *tangents])
    with mode, tracing(TracingContext(mode)):
        forward, backward = min_cut_rematerialization_partition(
            joint, (list(primals), list(tangents)), num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=[]
        )
    return forward, backward
