"""The lowering of models that use forward mode: by a trace of their own code, without tensors that have no data.

Torch loses the device of such tensors in forward mode (pytorch #185718).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.fx

from scoped_fn._backends import Backend
from scoped_fn._errors import CaptureError
from scoped_fn._graph import output_values
from scoped_fn._random.graph import KEY
from scoped_fn._specs import laid_out
from scoped_fn._torch.aot import ExportedGraph
from scoped_fn._torch.dynamo import compile_lock
from scoped_fn._torch.flat import differentiable_flat
from scoped_fn._trace import NotDerivableError, probe, trace_joint
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.live_code import live_code


def export_live(captured: Captured, wanted: tuple[bool, ...], backend: Backend) -> ExportedGraph:
    """Returns the ATen graph of a model, joint if gradients are wanted. Every buffer counts as changed.

    Raises:
        CaptureError: The model cannot be traced.
    """
    source, params = captured.source, len(captured.source.params)
    live = live_code(captured)
    specs = [replace(spec, requires_grad=False) for spec in captured.specs]
    places = tuple(i for i, wants in enumerate(wanted) if wants)
    buffers = range(params, params + len(source.buffers))
    drawn = KEY in captured.new_buffers

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        results = live(*tensors)
        outputs, end = captured.num_outputs, captured.num_outputs + len(buffers)
        return [*results[outputs:end], *results[:outputs], *results[end:]]  # what changes comes first, a key last

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
    return ExportedGraph(gm, of, tuple(buffers), captured.num_outputs + drawn, places if tangents else ())
