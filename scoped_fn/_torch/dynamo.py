"""What Dynamo reads from Python code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.functional_export import dynamo_graph_capture_for_export

__all__ = ["CAPTURE_SETTINGS", "DynamoCapture", "TorchDynamoException", "capture_with_dynamo", "compile_lock"]
# Static shapes and numbers: a new one is a new variant.
CAPTURE_SETTINGS = MappingProxyType(
    {
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": False,
        "specialize_int": True,
        "specialize_float": True,
        "allow_rnn": True,
    }
)


@dataclass(frozen=True)
class DynamoCapture:
    """What Dynamo saw.

    Attributes:
        gm: The torch-level graph; its placeholders are whatever tensors the function touched.
        values: The real tensor behind each placeholder: an argument, or something reached through a closure or module.
        rebuild: Graph outputs -> the function's own return value, with inputs and constants put back in place.
        side_effects: Sources of Python objects that the function changed; the changes are not made.
    """

    gm: torch.fx.GraphModule
    values: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    side_effects: tuple[str, ...]


def capture_with_dynamo(function: FunctionType) -> DynamoCapture:
    """Returns the graph of a call without arguments: all tensors come through closures.

    Changes nothing in the process: no Dynamo reset, no installed code.
    """
    # Dynamo writes into the globals of the function it reads. It gets its own, which die with the capture.
    function = FunctionType(
        function.__code__, dict(function.__globals__), function.__name__, function.__defaults__, function.__closure__
    )
    with dynamo_config.patch(dict(CAPTURE_SETTINGS)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gm = dynamo_graph_capture_for_export(function)()
    sources = [str(w.message).rsplit("check: ", 1)[-1] for w in caught if "side effects" in str(w.message)]
    for warning in caught:
        if "side effects" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return DynamoCapture(
        gm=gm,
        values=tuple(gm._dynamo_bytecode_flatten()),
        rebuild=lambda outputs: gm._dynamo_bytecode_unflatten(tuple(outputs), ()),
        side_effects=tuple(sources),
    )
