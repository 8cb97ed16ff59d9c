"""The stages `lower_training` and `lower_inference`: the torch-level graph to functional ATen graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from scoped_fn._backends import Backend, check_backend, decompositions, tracing_options
from scoped_fn._checked_op import keep_checks
from scoped_fn._errors import CaptureError, SpecError
from scoped_fn._fp8.shared_quantizations import share_quantizations
from scoped_fn._graph import Graph, copy_graph, output_values, refuse_random_ops
from scoped_fn._overrides import known_overrides
from scoped_fn._torch.aot import ExportedGraph, export_with_aot
from scoped_fn._torch.config import patched
from scoped_fn._torch.dynamo import compile_lock
from scoped_fn._torch.levels import apart
from scoped_fn._torch.tensors import fake_mode
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.effects import refuse_mutation, refuse_shared_memory
from scoped_fn.stages.lower_live import export_live
from scoped_fn.state import CompilerState

INFERENCE_LSTM = torch.ops.aten.mkldnn_rnn_layer.default


@dataclass(frozen=True, eq=False)
class Joint:
    """Forward and backward in one ATen graph.

    Attributes:
        captured: Where it came from.
        graph: Placeholders: those of `captured` (`primals_*`), then tangents (`tangents_*`). Outputs: the model's
            outputs, the new buffers, then gradients.
        new_buffers: Names of the buffers that the model changed.
        tangents: For each tangent, the index of the output that it belongs to.
        grads: For each gradient, the index of the placeholder that it belongs to.
        backend: The backend it was lowered for.
    """

    captured: Captured
    graph: Graph
    new_buffers: tuple[str, ...]
    tangents: tuple[int, ...]
    grads: tuple[int, ...]
    backend: Backend

    def __str__(self) -> str:
        return str(self.graph)

    @property
    def num_primals(self) -> int:
        """How many placeholders are no tangents."""
        return len(self.captured.specs)

    @property
    def num_forward(self) -> int:
        """How many outputs are no gradients."""
        return self.captured.num_outputs + len(self.new_buffers)


@dataclass(frozen=True, eq=False)
class Inference:
    """The forward alone, as an ATen graph.

    Attributes:
        captured: Where it came from.
        graph: Placeholders: those of `captured`. Outputs: the model's outputs, then the new buffers.
        new_buffers: Names of the buffers that the model changed.
        backend: The backend it was lowered for.
    """

    captured: Captured
    graph: Graph
    new_buffers: tuple[str, ...]
    backend: Backend

    def __str__(self) -> str:
        return str(self.graph)


def lower_training(
    state: CompilerState, captured: Captured, *, backend: Backend = "eager"
) -> tuple[CompilerState, Joint]:
    """Returns the joint graph of forward and backward; gradients for each placeholder that requires one.

    Args:
        state: Any state; returned as it is.
        captured: A captured model.
        backend: Decides which operations are taken apart: "inductor" wants small ones, the others none.

    Raises:
        SpecError: No parameter or input requires a gradient, or no output depends on one that does.
        MutationError: The model changes an argument in place.
        RandomOpError: The model draws random numbers in a way that cannot draw from a key.
    """
    joint = lower_joint(state, captured, tuple(spec.requires_grad for spec in captured.specs), backend)
    if not joint.tangents:
        raise SpecError(
            f"Expected an output of {captured.source.name} that depends on a parameter or input that requires a "
            "gradient, got none. Lower for inference instead."
        )
    return state, joint


def lower_inference(
    state: CompilerState, captured: Captured, *, backend: Backend = "eager"
) -> tuple[CompilerState, Inference]:
    """Returns the forward graph alone. Arguments and errors are those of `lower_training`."""
    with patched(known_overrides(state, captured.owner)):
        exported = _export(captured, (False,) * len(captured.specs), backend)
    gm, new_buffers, _ = _arrange(captured, exported, ())
    refuse_shared_memory(captured, new_buffers)
    graph = Graph(gm, captured.graph.inputs, _forward_names(captured, new_buffers))
    return state, Inference(captured, graph, new_buffers, backend)


def lower_joint(state: CompilerState, captured: Captured, wanted: tuple[bool, ...], backend: Backend) -> Joint:
    """Returns the joint graph with gradients for the wanted placeholders, one flag for each placeholder."""
    with patched(known_overrides(state, captured.owner)):
        exported = _export(captured, wanted, backend)
        if any(node.target is INFERENCE_LSTM for node in exported.gm.graph.nodes):
            exported = _export(captured, _with_inputs(captured, wanted), backend)
    gm, new_buffers, grads = _arrange(captured, exported, wanted)
    refuse_shared_memory(captured, new_buffers)
    names = _forward_names(captured, new_buffers)
    tangents = tuple(_tangent_index(of, captured, new_buffers) for of in exported.tangents)
    inputs = (*captured.graph.inputs, *(f"tangent({names[i]})" for i in tangents))
    outputs = (*names, *(f"grad({captured.graph.inputs[i]})" for i in grads))
    return Joint(captured, Graph(gm, inputs, outputs), new_buffers, tangents, grads, backend)


def _with_inputs(captured: Captured, wanted: tuple[bool, ...]) -> tuple[bool, ...]:
    """Adds the inputs: torch takes an LSTM whose input requires no gradient for inference, parameters or not (2.14)."""
    start = captured.num_held
    differentiable = [spec.dtype.is_floating_point for spec in captured.specs[start:]]
    return (*wanted[:start], *(w or d for w, d in zip(wanted[start:], differentiable, strict=True)))


def _export(captured: Captured, wanted: tuple[bool, ...], backend: Backend) -> ExportedGraph:
    check_backend(backend)
    gm = copy_graph(captured.graph.gm)
    torch_rng = captured.rng == "torch"
    grad_mode = captured.grad_mode or any(wanted)
    mode = fake_mode()
    if captured.needs_code:
        return export_live(captured, wanted, backend)
    try:
        with compile_lock, apart(), torch.set_grad_enabled(grad_mode), tracing_options(backend, torch_rng=torch_rng):
            with mode:
                fakes = [replace(s, requires_grad=w).fake() for s, w in zip(captured.specs, wanted, strict=True)]
            exported = export_with_aot(gm, fakes, decompositions(backend))
    except Exception:
        refuse_mutation(captured, ())
        raise
    refuse_mutation(captured, exported.mutated)
    if not torch_rng:
        refuse_random_ops(exported.gm, captured.source.name)
    return exported


def _arrange(
    captured: Captured, exported: ExportedGraph, wanted: tuple[bool, ...]
) -> tuple[torch.fx.GraphModule, tuple[str, ...], tuple[int, ...]]:
    """Orders the outputs: the model's, the new buffers, the gradients that exist. Edits the exported graph."""
    gm, output = exported.gm, exported.gm.graph.output_node()
    values = list(zip(output_values(gm), output.meta["desc"], strict=True))
    start = len(exported.mutated)
    end = start + exported.num_outputs
    results = values[start:end]
    buffers = {captured.graph.inputs[i]: values[at] for at, i in enumerate(exported.mutated)}
    assigned = [name for name in captured.new_buffers if not (captured.needs_code and name in captured.source.buffers)]
    buffers |= dict(zip(assigned, results[captured.num_outputs :], strict=True))
    kept = [
        (value, of) for value, of in zip(values[end:], exported.grads, strict=True) if of is not None and wanted[of]
    ]
    ordered = [*results[: captured.num_outputs], *buffers.values(), *(value for value, _ in kept)]
    output.args = ([value for value, _ in ordered],)
    output.meta["desc"] = [kind for _, kind in ordered]
    return share_quantizations(keep_checks(gm)), tuple(buffers), tuple(of for _, of in kept)


def _forward_names(captured: Captured, new_buffers: tuple[str, ...]) -> tuple[str, ...]:
    return (*captured.graph.outputs[: captured.num_outputs], *(f"new {name}" for name in new_buffers))


def _tangent_index(of: Any, captured: Captured, new_buffers: tuple[str, ...]) -> int:
    if isinstance(of, int) and of < captured.num_outputs:
        return of
    name = captured.new_buffers[of - captured.num_outputs] if isinstance(of, int) else captured.graph.inputs[of[1]]
    if not isinstance(of, int) and name in captured.new_buffers:
        raise CaptureError(
            f"Expected buffer {name!r} to be changed in place or assigned anew, got both, with a gradient. Do one."
        )
    return captured.num_outputs + new_buffers.index(name)
