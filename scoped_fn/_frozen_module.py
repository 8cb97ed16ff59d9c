"""Copies of a module that share its tensors: what later variants are captured from."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def replace_tensors(module: nn.Module, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
    """Returns a deep copy of a module that shares its tensors, except those that are replaced.

    Args:
        module: The module; it is not touched.
        tensors: `id` of a parameter or buffer -> what takes its place, wherever the module refers to it.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in _tensors(module)}
    memo.update(tensors)
    try:
        return copy.deepcopy(module, memo)
    except Exception:  # noqa: BLE001 - whatever cannot be copied, such as a lock: share all but modules and tensors
        return _structural_copy(module, tensors, {})


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        for value in part.__dict__.values():
            items = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
            )
            yield from (item for item in items if isinstance(item, torch.Tensor))


def _structural_copy(module: nn.Module, tensors: Mapping[int, torch.Tensor], done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    made: nn.Module = object.__new__(type(module))
    done[id(module)] = made
    fields, children = made.__dict__, module.__dict__["_modules"].items()
    for name, value in module.__dict__.items():
        fields[name] = _swap(value, tensors)
    fields["_modules"] = {
        name: child if child is None else _structural_copy(child, tensors, done) for name, child in children
    }
    return made


def _swap(value: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        swapped = copy.copy(value)
        swapped.update({key: tensors.get(id(item), item) for key, item in value.items()})
        return swapped
    if type(value) in (list, tuple):
        return type(value)(tensors.get(id(item), item) for item in value)
    return tensors.get(id(value), value)
