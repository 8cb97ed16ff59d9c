"""A value from JSON and tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from scoped_fn._checkpoint.dtypes import dtype_of, original_form
from scoped_fn._checkpoint.plain import Document, device_of, tag_of, value_of
from scoped_fn._checkpoint.state_value import state_value
from scoped_fn._checkpoint.unfit import Unfit, demand, refusal
from scoped_fn._specs import TensorSpec

MAX_JSON_DEPTH = 256


def decode(document: Document, tensors: Mapping[str, torch.Tensor], device: torch.device | None = None) -> Any:
    """Returns the value that JSON and tensors stand for.

    Args:
        document: As `encode` gives it.
        tensors: The tensors in their stored forms, by name.
        device: Where tensors go; None for where they were when they were saved.

    Raises:
        Unfit: They stand for no value, or not each tensor is used once.
    """
    demand(is_shallow(document), f"JSON of a depth of at most {MAX_JSON_DEPTH}", "deeper JSON")
    decoder = _Decoder(dict(tensors), device)
    value = decoder.value(document)
    demand(not decoder.left, "each tensor in one place", sorted(decoder.left))
    return value


def is_shallow(document: Document) -> bool:
    """Returns whether JSON is nested at most `MAX_JSON_DEPTH` deep."""
    level = [document]
    for _ in range(MAX_JSON_DEPTH):
        level = [part for node in level for part in _parts(node)]
        if not level:
            return True
    return False


class _Decoder:
    """Gives out the tensors of one file, each once."""

    def __init__(self, tensors: dict[str, torch.Tensor], device: torch.device | None) -> None:
        self.left, self.device = tensors, device

    def value(self, document: Document) -> Any:
        if isinstance(document, dict) and "tensor" in document:
            return self.take(document)
        tag, content = tag_of(document)
        return state_value(content, self.take) if tag == "state" else value_of(tag, content, self.value)

    def take(self, document: Document) -> torch.Tensor:
        well = isinstance(document, dict) and {"tensor"} <= document.keys() <= {"tensor", "dtype", "device", "stride"}
        demand(well, "a tensor", document)
        name = document["tensor"]
        demand(isinstance(name, str) and name in self.left, "the name of a tensor that is used once", name)
        tensor = self.left.pop(name)
        if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise Unfit(f"booleans of the bytes 0 and 1 in {name}", "others")
        if "dtype" in document:
            tensor = original_form(tensor, dtype_of(document["dtype"]))
        if "stride" in document:
            tensor = _arranged(tensor, document["stride"])
        return _moved(tensor, self.device or device_of(document.get("device", "cpu")))


def _arranged(tensor: torch.Tensor, stride: Any) -> torch.Tensor:
    """Returns the tensor in another order of its dimensions in memory."""
    well = isinstance(stride, list) and len(stride) == tensor.dim() and all(type(step) is int for step in stride)
    demand(well, f"strides of {tensor.dim()} dimensions", stride)
    spec = TensorSpec(tensor.shape, tuple(stride), tensor.dtype, tensor.device, False)
    demand(spec.dense() == spec, "strides without gaps or overlaps", stride)
    # A file gives contiguous tensors. One that is not is about to be saved, from where it is.
    return spec.fit(tensor) if tensor.is_contiguous() else tensor


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    demand(device.type != "meta", "a device with memory", str(device))
    try:
        return tensor.to(device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise refusal(
            f"the device {device}", f"'{reason}'", 'Choose one that is here: load(path, device="cpu").'
        ) from None


def _parts(node: Document) -> list[Document]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []
