"""A state as JSON, beside its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.utils._pytree as pytree

from scoped_fn._checkpoint.leaves import FP8_TENSORS, sharing
from scoped_fn._checkpoint.plain import Document, described, plain_document
from scoped_fn._checkpoint.recipes import recipe_document, scope_document
from scoped_fn._checkpoint.unfit import refusal
from scoped_fn._specs import TensorSpec
from scoped_fn._structure import Static, Structure
from scoped_fn.state import CompilerState, Fp8State, InputQueue, InputSpec, Owner

Add = Callable[[str, torch.Tensor], Document]

PLAIN_INPUTS = "Take the inputs out first (sf.take_inputs), or push tensors, numbers, strings, lists, tuples and dicts."


def state_document(state: CompilerState, path: str, add: Add) -> Document:
    """Returns a state as JSON.

    Args:
        state: The state.
        path: Where it is, the start of its tensors' names.
        add: Keeps a tensor under a name and returns what stands for it.
    """
    prefix = f"{path}." if path else ""
    first = sharing(state)
    return {
        "next_token": state.next_token,
        "owners": _pairs(state.owners, owner_document),
        "autocast": [scope_document(scope, f"{prefix}autocast.{i}") for i, scope in enumerate(state.autocast)],
        "overrides": _pairs(state.overrides, lambda held: _pairs(held, lambda v: plain_document(v, "an override"))),
        "constants": _pairs(state.constants, lambda value: plain_document(value, "a constant")),
        "key": add(f"{prefix}key", state.key),
        "buffers": [
            [token, [[name, add(f"{prefix}buffers.{token}.{name}", tensor)] for name, tensor in named.items()]]
            for token, named in state.buffers.items()
        ],
        "fp8": [
            [token, {"same_as": first[token]} if first[token] != token else _fp8(held, f"{prefix}fp8.{token}", add)]
            for token, held in state.fp8.items()
        ],
        "inputs": [[token, _queue(queue, f"{prefix}inputs.{token}", add)] for token, queue in state.inputs.items()],
    }


def owner_document(owner: Owner) -> Document:
    """Returns an owner as JSON."""
    return {field.name: plain_document(getattr(owner, field.name), "an owner") for field in fields(owner)}


def _pairs(mapping: Mapping[Any, Any], document: Callable[[Any], Document]) -> Document:
    return [[key, document(value)] for key, value in mapping.items()]


def _fp8(held: Fp8State, path: str, add: Add) -> Document:
    return {
        "columns": [list(column) for column in held.columns],
        "recipe": recipe_document(held.recipe, f"{path}.recipe"),
        **{name: add(f"{path}.{name}", getattr(held, name)) for name in FP8_TENSORS},
    }


def _queue(queue: InputQueue, path: str, add: Add) -> Document:
    entries = [
        {
            "structure": structure_document(entry.structure, path),
            "in_frame": entry.in_frame,
            "tensors": [add(f"{path}.entries.{call}.{index}", tensor) for index, tensor in enumerate(entry.tensors)],
        }
        for call, entry in enumerate(queue.entries)
    ]
    return {"entries": entries, "spec": _spec(queue.spec, f"{path}.spec", add)}


def _spec(spec: InputSpec, path: str, add: Add) -> Document:
    return {
        "structure": structure_document(spec.structure, path),
        "specs": [_tensor_spec(each) for each in spec.specs],
        "kept": list(spec.kept),
        "values": [add(f"{path}.{index}", tensor) for index, tensor in enumerate(spec.values)],
    }


def _tensor_spec(spec: TensorSpec) -> Document:
    return {
        "shape": list(spec.shape),
        "stride": list(spec.stride),
        "dtype": plain_document(spec.dtype, "a spec"),
        "device": plain_document(spec.device, "a spec"),
        "requires_grad": spec.requires_grad,
    }


def structure_document(structure: Structure, path: str) -> Document:
    """Returns a structure of lists, tuples and dicts as JSON; raises `Unfit` for other containers and leaves."""
    containers = pytree.tree_unflatten(range(len(structure.leaves)), structure.spec)
    leaves = [_leaf_document(leaf, path) for leaf in structure.leaves]
    scope = None if structure.scope is None else scope_document(structure.scope, path)
    return {"containers": plain_document(containers, path), "leaves": leaves, "scope": scope}


def _leaf_document(leaf: Any, path: str) -> Document:
    if leaf is None:
        return None
    if not isinstance(leaf, Static):
        raise refusal(f"queued inputs of plain containers at {path}", described(leaf[0]), PLAIN_INPUTS)
    return {"static": plain_document(leaf.value, path)}
