"""Capture by running the model on tensors without data: second choice, for Python code that Dynamo refuses.

Plain tracing sees operations, not code, so checkpoint regions and custom gradients would be lost in silence: they are
refused.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch

from scoped_fn._errors import CaptureError
from scoped_fn._frozen_module import replace_tensors
from scoped_fn._source import Source, buffer_places, unset_buffers
from scoped_fn._specs import spec_of
from scoped_fn._structure import Structure, flatten, unflatten
from scoped_fn._torch import fake_mode, make_fx
from scoped_fn.stages.captured import Pieces, refuse_none, warn_about_side_effects
from scoped_fn.stages.trace_watch import refuse_hidden_rules, user_place


def capture_trace(
    source: Source, structure: Structure, tensors: list[torch.Tensor]
) -> tuple[Pieces, Any, dict[str, torch.Tensor]]:
    """Returns the raw graph, the structured result with stand-ins for tensors, and the buffers assigned anew."""
    real = [*source.params.values(), *source.buffers.values(), *tensors]
    seen: dict[str, Any] = {}

    def flat(*traced: torch.Tensor) -> list[torch.Tensor]:
        seen["inputs"] = traced
        seen["result"], seen["changed"] = _run(source, structure, real, traced)
        return [*flatten(seen["result"], "outputs")[0], *seen["changed"].values()]

    mode = fake_mode()
    try:
        with mode:
            fakes = [spec_of(tensor, "a tensor").fake() for tensor in real]
            refuse_hidden_rules(flat, fakes)
            gm = make_fx(flat, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(_explain(error, source)) from error
    return _pieces(gm, real, seen)


def _run(
    source: Source, structure: Structure, real: list[torch.Tensor], traced: Sequence[torch.Tensor]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Runs the model with its tensors replaced by traced ones; returns its result and the buffers assigned anew."""
    args, kwargs = unflatten(structure, list(traced[_held(source) :]))
    if not source.is_module:
        return source.call(*args, **kwargs), {}
    # A buffer that requires a gradient is cloned: a leaf could not be changed in place.
    carried = {id(own) for own in source.buffers.values() if own.requires_grad}
    places = {id(t): new.clone() if id(t) in carried else new for t, new in zip(real, traced, strict=True)}
    model = replace_tensors(source.call, places)  # type: ignore[arg-type]
    unset = unset_buffers(model)
    attributes = _attributes(model)
    result = model(*args, **kwargs)
    after = {
        name: getattr(module, leaf)
        for name, (module, leaf) in zip(source.buffers, buffer_places(model, source.buffers), strict=True)
    }
    refuse_none(source, after, [getattr(module, name) for module, name in unset])
    warn_about_side_effects(
        source, [f"self.{name}" for name, value in _attributes(model).items() if attributes.get(name) is not value]
    )
    changed: dict[str, torch.Tensor] = {}
    for name, before in source.buffers.items():
        now = after[name]
        if now is not places[id(before)] or id(before) in carried:
            changed[name] = now
    return result, changed


def _attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Returns every attribute of every submodule but for the tables that modules keep themselves."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if not (name.startswith("_") and isinstance(value, dict))
    }


def _held(source: Source) -> int:
    return len(source.params) + len(source.buffers)


def _pieces(
    gm: torch.fx.GraphModule, real: list[torch.Tensor], seen: dict[str, Any]
) -> tuple[Pieces, Any, dict[str, torch.Tensor]]:
    """Turns closed-over constants into placeholders, and passed-through inputs into the real tensors."""
    values: list[Any] = list(real)
    last = gm.graph.find_nodes(op="placeholder")
    for node in gm.graph.find_nodes(op="get_attr"):
        constant = getattr(gm, str(node.target), None)
        if isinstance(constant, torch.Tensor):
            with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
                lifted = gm.graph.placeholder(f"lifted_{len(values)}")
            lifted.meta = dict(node.meta)
            node.replace_all_uses_with(lifted)
            gm.graph.erase_node(node)
            last.append(lifted)
            values.append(constant)
    order = gm.graph.find_nodes(op="placeholder")
    by_node = dict(zip(last, values, strict=True))
    outputs = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    found = [by_node.get(o, i) for i, o in enumerate(outputs)]
    return Pieces(gm, [by_node[node] for node in order], found), seen["result"], seen["changed"]


def _explain(error: Exception, source: Source) -> str:
    where = user_place(traceback.extract_tb(error.__traceback__))
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    return (
        f"Expected {source.name} to run on tensors without data, got {type(error).__name__}{where}: {reason}. "
        "For a choice that depends on tensor values use torch.where or torch.cond."
    )
