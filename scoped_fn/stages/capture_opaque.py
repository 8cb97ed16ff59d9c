"""Capture as one operation that calls the model's Python code, for rules that no graph can hold.

Dynamo refuses custom `autograd.Function`s with a rule for forward mode. Their code is kept as it is; lowering runs it,
and so does the derivation of every derivative.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from scoped_fn._live import buffers_after, copy_with
from scoped_fn._random.rules import DrawsSeen, OwnDraws
from scoped_fn._source import Source
from scoped_fn._specs import spec_of
from scoped_fn._structure import Structure, flatten
from scoped_fn._torch.tensors import fake_mode
from scoped_fn.stages.captured import Pieces
from scoped_fn.stages.trace_watch import python_draws_refused


def capture_opaque(
    source: Source, structure: Structure, tensors: list[torch.Tensor]
) -> tuple[Pieces, Any, dict[str, torch.Tensor]]:
    """Returns a graph of one call, the structured result with stand-ins for tensors, and the buffers assigned anew."""
    real = [*source.params.values(), *source.buffers.values(), *tensors]
    with python_draws_refused(), fake_mode():
        fakes = [spec_of(tensor, "a tensor").fake() for tensor in real]
        copies = [fake.detach().clone().requires_grad_(fake.requires_grad) for fake in fakes]
        with DrawsSeen() as draws:
            result, after = _run(source, structure, copies)
    held = dict(zip(source.buffers, copies[len(source.params) :], strict=False))
    changed = {name: now for name, now in after.items() if now is not held[name]}

    def call_model(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, now = _run(source, structure, given)
        return (*flatten(out, "outputs")[0], *(now[name] for name in changed))

    values = [*flatten(result, "outputs")[0], *changed.values()]
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"given_{i}") for i in range(len(real))]
    for node, fake in zip(nodes, fakes, strict=True):
        node.meta["val"] = fake
    called = graph.call_function(OwnDraws(call_model) if draws.found else call_model, tuple(nodes))
    outputs = [graph.call_function(operator.getitem, (called, i)) for i in range(len(values))]
    for node, value in zip(outputs, values, strict=True):
        node.meta["val"] = value.detach()
    graph.output(tuple(outputs))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    return Pieces(gm, real, list(range(len(outputs)))), result, changed


def _run(source: Source, structure: Structure, given: Sequence[torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    call, model = copy_with(source, structure, given)
    result = call()
    return result, buffers_after(source, model) if model is not None else {}
