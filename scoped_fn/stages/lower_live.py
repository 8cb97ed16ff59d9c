"""The lowering of models that use forward mode: by a trace of their own code, without tensors that have no data.

Torch loses the device of such tensors in forward mode (pytorch #185718).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from scoped_fn._ambient import ambient_settings
from scoped_fn._backends import Backend
from scoped_fn._errors import CaptureError
from scoped_fn._graph import output_values
from scoped_fn._live import Live
from scoped_fn._replay import uses_forward_mode, uses_transforms
from scoped_fn._specs import laid_out
from scoped_fn._torch import ExportedGraph, compile_lock
from scoped_fn._torch_flat import differentiable_flat
from scoped_fn._trace import NotDerivableError, probe, trace_joint
from scoped_fn.stages.captured import Captured


def needs_code(captured: Captured) -> bool:
    """Returns whether a model has to be lowered from its own code.

    Forward mode is one reason. The other: in a transform inside the model Dynamo takes the forward of a custom Function
    alone where the Function is applied to what is differentiated, and its backward is lost.
    """
    gm = captured.graph.gm
    return uses_forward_mode(gm) or (uses_transforms(gm) and _applies_custom_functions(captured))


def _applies_custom_functions(captured: Captured) -> bool:
    """Runs the model's code without data, and looks whether it applies a custom Function."""
    found: list[Any] = []
    code = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code:
            found.append(frame)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        probe(_live(captured), [replace(spec, requires_grad=False) for spec in captured.specs], dual=False)
    except NotDerivableError:
        return True
    finally:
        sys.setprofile(before)
    return bool(found)


def _live(captured: Captured) -> Live:
    source, ambient = captured.source, ambient_settings("training")
    return Live(source, captured.in_structure, len(captured.constants), tuple(source.buffers), ambient)


def export_live(captured: Captured, wanted: tuple[bool, ...], backend: Backend) -> ExportedGraph:
    """Returns the ATen graph of a model, joint if gradients are wanted. Every buffer counts as changed.

    Raises:
        CaptureError: The model cannot be traced.
    """
    source, params = captured.source, len(captured.source.params)
    live = _live(captured)
    specs = [replace(spec, requires_grad=False) for spec in captured.specs]
    places = tuple(i for i, wants in enumerate(wanted) if wants)
    buffers = range(params, params + len(source.buffers))

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        results = live(*tensors)
        outputs = captured.num_outputs
        return [*results[outputs:], *results[:outputs]]  # what changes comes first

    try:
        with compile_lock:
            carries = probe(lambda *t: differentiable_flat(run, t, places), specs, dual=True) if places else []
            outs = probe(run, specs, dual=True) if any(carries) else []
            tangents = {i: laid_out(outs[i]) for i, has in enumerate(carries) if has}
            gm = trace_joint(run, specs, places, tangents, backend, torch_rng=captured.rng == "torch", dual=True)
    except NotDerivableError as error:
        raise CaptureError(
            f"Expected {source.name} to be traced with the transforms it uses, got: {error}. Check it in eager."
        ) from error
    gm.graph.output_node().meta["desc"] = [None] * len(output_values(gm))
    of = tuple(("buffer", buffers[i]) if i < len(buffers) else i - len(buffers) for i in tangents)
    return ExportedGraph(gm, of, tuple(buffers), captured.num_outputs, places if tangents else ())
