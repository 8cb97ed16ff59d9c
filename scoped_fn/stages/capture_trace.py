"""Capture by running the model on tensors without data: second choice, for Python code that Dynamo refuses.

Plain tracing sees operations, not code, so checkpoint regions and custom gradients would be lost in silence: they are
refused. A model whose custom Functions have rules for every transform is kept as its code instead.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch

from scoped_fn._errors import CaptureError
from scoped_fn._live import buffers_after, copy_with
from scoped_fn._source import Source, unset_buffers
from scoped_fn._specs import spec_of
from scoped_fn._structure import Structure, flatten
from scoped_fn._torch.tensors import fake_mode
from scoped_fn._torch.tracing import make_fx
from scoped_fn.stages.capture_opaque import capture_opaque
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
        seen["result"], seen["changed"] = _run(source, structure, traced)
        return [*flatten(seen["result"], "outputs")[0], *seen["changed"].values()]

    mode = fake_mode()
    try:
        with mode:
            fakes = [spec_of(tensor, "a tensor").fake() for tensor in real]
            only_code = refuse_hidden_rules(flat, fakes)
            if not only_code:
                gm = make_fx(flat, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(_explain(error, source)) from error
    if only_code:
        return capture_opaque(source, structure, tensors)
    return _pieces(gm, real, seen)


def _run(source: Source, structure: Structure, traced: Sequence[torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Runs the model with its tensors replaced by traced ones; returns its result and the buffers assigned anew."""
    # A buffer that requires a gradient is cloned: a leaf could not be changed in place.
    carried = {name for name, own in source.buffers.items() if own.requires_grad}
    start, names = len(source.params), list(source.buffers)
    given = [
        new.clone() if 0 <= i - start < len(names) and names[i - start] in carried else new
        for i, new in enumerate(traced)
    ]
    call, model = copy_with(source, structure, given)
    if model is None:
        return call(), {}
    unset, attributes = unset_buffers(model), _attributes(model)
    result = call()
    after = buffers_after(source, model)
    refuse_none(source, after, [getattr(module, name) for module, name in unset])
    warn_about_side_effects(
        source, [f"self.{name}" for name, value in _attributes(model).items() if attributes.get(name) is not value]
    )
    before = dict(zip(names, given[start:], strict=False))
    return result, {name: now for name, now in after.items() if now is not before[name] or name in carried}


def _attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Returns every attribute of every submodule but for the tables that modules keep themselves."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if not (name.startswith("_") and isinstance(value, dict))
    }


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
