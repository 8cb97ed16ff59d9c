"""Capture by Dynamo: reads the model's Python code, keeps checkpoint regions and custom gradients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import FunctionType
from typing import Any, cast

import torch

from scoped_fn._errors import CaptureError, RandomOpError
from scoped_fn._graph import fake_value
from scoped_fn._random.rules import refused_option
from scoped_fn._source import Source
from scoped_fn._structure import Structure, flatten, unflatten
from scoped_fn._torch.dynamo import DynamoCapture, TorchDynamoException, capture_with_dynamo
from scoped_fn.stages.capture_opaque import capture_opaque
from scoped_fn.stages.captured import Pieces, refuse_none, warn_about_side_effects
from scoped_fn.stages.trace_watch import user_place


def capture_dynamo(
    source: Source, structure: Structure, tensors: list[torch.Tensor]
) -> tuple[Pieces, Any, dict[str, torch.Tensor]]:
    """Returns the raw graph, the structured result with stand-ins for tensors, and the buffers assigned anew."""
    places, unset = source.buffer_places, source.unset_buffers
    carried = [place for place, own in zip(places, source.buffers.values(), strict=True) if own.requires_grad]
    args, kwargs = unflatten(structure, tensors)

    def call() -> Any:
        for module, name in carried:  # a leaf that requires a gradient could not be changed in place
            setattr(module, name, getattr(module, name).clone())
        result = source.call(*args, **kwargs)
        # The constant keeps a graph without any operation from being empty, which Dynamo refuses.
        now = [getattr(module, name) for module, name in places]
        return result, now, [getattr(module, name) for module, name in unset], torch.zeros(())

    try:
        captured = capture_with_dynamo(cast(FunctionType, call))
    except TorchDynamoException as error:
        if any(f"Unsupported custom {rule}" in str(error) for rule in ("jvp", "vjp")):
            return capture_opaque(source, structure, tensors)
        if "as_proxy" in str(error) and "(Generator)" in str(error):
            place = user_place(getattr(error, "real_stack", None) or [])
            raise RandomOpError(refused_option(source.name, "generator", place)) from None
        raise CaptureError(_explain(error, source)) from None
    _warn_about(captured.side_effects, source)
    return _pieces(captured, source)


def _pieces(captured: DynamoCapture, source: Source) -> tuple[Pieces, Any, dict[str, torch.Tensor]]:
    stand_ins = [_stand_in(node) for node in captured.gm.graph.output_node().args[0]]  # type: ignore[union-attr]
    result, buffers, unset, marker = captured.rebuild(stand_ins)
    refuse_none(source, dict(zip(source.buffers, buffers, strict=True)), unset)
    index = {id(tensor): i for i, tensor in enumerate(stand_ins)}
    changed = {
        name: now for (name, before), now in zip(source.buffers.items(), buffers, strict=True) if now is not before
    }
    found = [*flatten(result, "outputs")[0], *changed.values()]
    outputs: Sequence[int | torch.Tensor] = [index.get(id(tensor), tensor) for tensor in found]
    return Pieces(captured.gm, captured.values, outputs, index[id(marker)]), result, changed


def _stand_in(node: Any) -> torch.Tensor:
    value = fake_value(node) if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise CaptureError(
            f"Expected outputs that are tensors or independent of tensor values, got {value!r} from {node}. "
            "Return the tensor itself, without .item()."
        )
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _warn_about(side_effects: tuple[str, ...], source: Source) -> None:
    sources = [name for text in side_effects for name in re.findall(r"\"[^\"]*\"|'[^']*'(?=[,\]])", text)]
    # `functional_call` puts tensors into another module than the one that is compiled, and takes them out again.
    own = "L['source'].call"
    borrowed = "._parameters" if not source.is_module else ".captured.source.call"
    sources = [name for name in sources if "_buffers" not in name and borrowed not in name]
    sources = [name for name in sources if "._parameters" not in name or own in name]
    places = {n.strip("\"'").replace(own, "self") for n in sources}
    warn_about_side_effects(source, sorted(places))


BRANCH = "For a choice that depends on tensor values use torch.where or torch.cond."
SHAPES = "Check the shapes and dtypes: the same call fails in eager."
PYTHON = 'For Python code that Dynamo cannot read, compile with capture="trace".'


def _explain(error: TorchDynamoException, source: Source) -> str:
    stack = getattr(error, "real_stack", None) or []
    text = str(error)
    reason = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    advice = SHAPES if "fake tensor call" in reason else BRANCH if "ata-dependent" in reason else f"{BRANCH} {PYTHON}"
    return f"Expected {source.name} to be one graph, got '{reason}'{user_place(stack)}. {_why(text)} {advice}"


def _why(text: str) -> str:
    """Returns the one sentence of Dynamo's text that says most."""
    for pattern in (
        r"got (\w+\(.*?\))(?:\n|$)",
        r"context: (raised exception .+)",
        r"Explanation: (.+?)(?:\n\n|\n  Hint|$)",
    ):
        found = re.search(pattern, text, re.DOTALL if "Explanation" in pattern else 0)
        if found:
            return " ".join(found.group(1).split()).rstrip(".") + "."
    return ""
