"""Queued inputs from JSON and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from scoped_fn._checkpoint.dtypes import described_tensor
from scoped_fn._checkpoint.plain import Document, plain_value
from scoped_fn._checkpoint.recipes import scope_value
from scoped_fn._checkpoint.unfit import Unfit, demand
from scoped_fn._specs import TensorSpec
from scoped_fn._structure import Static, Structure
from scoped_fn.state import InputQueue, InputSpec, QueuedInputs

Take = Callable[[Document], torch.Tensor]

LARGEST = 2**62


def queue_value(document: Document, take: Take) -> InputQueue:
    """Returns the queue that JSON stands for."""
    _demand_fields(document, "queued inputs", ("entries", "spec"))
    return InputQueue(tuple(_entry(each, take) for each in _list(document["entries"])), _spec(document["spec"], take))


def structure_value(document: Document) -> Structure:
    """Returns the structure that JSON stands for."""
    _demand_fields(document, "a structure", ("containers", "leaves", "scope"))
    leaves = tuple(_leaf(each) for each in _list(document["leaves"]))
    found, spec = pytree.tree_flatten(plain_value(document["containers"]))
    ordered = all(type(index) is int for index in found) and found == list(range(len(leaves)))
    demand(ordered, f"containers of the numbers below {len(leaves)}, in order", found)
    scope = None if document["scope"] is None else scope_value(document["scope"])
    return Structure(spec, leaves, scope)


def _entry(document: Document, take: Take) -> QueuedInputs:
    _demand_fields(document, "inputs of a call", ("structure", "in_frame", "tensors"))
    structure, tensors = structure_value(document["structure"]), tuple(map(take, _list(document["tensors"])))
    demand(type(document["in_frame"]) is bool, "whether a frame was open", document["in_frame"])
    demand(len(tensors) == structure.num_tensors, f"{structure.num_tensors} tensors of a call", len(tensors))
    return QueuedInputs(structure, document["in_frame"], tensors)


def _spec(document: Document, take: Take) -> InputSpec:
    _demand_fields(document, "a spec of inputs", ("structure", "specs", "kept", "values"))
    structure, specs = structure_value(document["structure"]), tuple(map(_tensor_spec, _list(document["specs"])))
    kept, values = _list(document["kept"]), tuple(map(take, _list(document["values"])))
    demand(len(specs) == structure.num_tensors, f"{structure.num_tensors} specs", len(specs))
    rising = all(type(i) is int and 0 <= i < len(specs) for i in kept) and kept == sorted(set(kept))
    demand(rising and len(kept) == len(values), f"the places of {len(values)} tensors that are kept", kept)
    for index, value in zip(kept, values, strict=True):
        if value.shape != specs[index].shape or value.dtype != specs[index].dtype:
            raise Unfit(f"a kept tensor as {specs[index]}", described_tensor(value))
    return InputSpec(structure, specs, tuple(kept), values)


def _tensor_spec(document: Document) -> TensorSpec:
    _demand_fields(document, "a spec of a tensor", ("shape", "stride", "dtype", "device", "requires_grad"))
    sizes = {name: _list(document[name]) for name in ("shape", "stride")}
    for each in sizes.values():
        demand(all(type(n) is int and 0 <= n < LARGEST for n in each), "whole numbers", each)
    demand(len(sizes["shape"]) == len(sizes["stride"]), f"strides for {sizes['shape']}", sizes["stride"])
    dtype, device = plain_value(document["dtype"]), plain_value(document["device"])
    demand(isinstance(dtype, torch.dtype) and isinstance(device, torch.device), "a dtype and a device", (dtype, device))
    demand(type(document["requires_grad"]) is bool, "whether a gradient is wanted", document["requires_grad"])
    return TensorSpec(torch.Size(sizes["shape"]), tuple(sizes["stride"]), dtype, device, document["requires_grad"])


def _leaf(document: Document) -> Static | None:
    if document is None:
        return None
    _demand_fields(document, "a leaf that is no tensor", ("static",))
    return Static(plain_value(document["static"]))


def _demand_fields(document: Document, what: str, names: tuple[str, ...]) -> None:
    demand(isinstance(document, dict) and document.keys() == set(names), f"{what} with {', '.join(names)}", document)


def _list(content: Any) -> list[Any]:
    demand(isinstance(content, list), "a list", content)
    return list(content)
