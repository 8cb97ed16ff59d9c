"""Plain tensors, and tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.fake_tensor import is_fake as is_any_fake
from torch.fx.experimental.symbolic_shapes import ShapeEnv

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def fake_mode() -> FakeTensorMode:
    """Returns a mode in which tensors have shapes, dtypes and devices but no data. Shapes are static."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """Returns the fake mode of the first value that has one, or a new one."""
    return next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None) or fake_mode()


def is_fake(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor that no transform acts on has no data: it is being traced."""
    return type(tensor) not in PLAIN_TYPES and is_any_fake(tensor)


def storage_id(tensor: torch.Tensor) -> int:
    """Returns a number that two tensors share exactly when they share memory; works on fake tensors."""
    return int(tensor.untyped_storage()._cdata)


def version(tensor: torch.Tensor) -> int:
    """Returns how often the tensor was changed in place; works on fake tensors."""
    return int(tensor._version)


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns how often each tensor was changed in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
