"""optree's tree functions, bound to the namespace in which `CompilerState` is registered.

Without its namespace optree takes a state for one leaf and says nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import optree
import torch

from scoped_fn.state.compiler_state import NAMESPACE

tree_map = partial(optree.tree_map, namespace=NAMESPACE)
tree_leaves = partial(optree.tree_leaves, namespace=NAMESPACE)
tree_flatten = partial(optree.tree_flatten, namespace=NAMESPACE)
tree_structure = partial(optree.tree_structure, namespace=NAMESPACE)
tree_unflatten = optree.tree_unflatten


def tree_equal(left: Any, right: Any) -> bool:
    """Returns whether two trees have one structure and equal leaves.

    Tensors are equal when dtype, shape, device and every value are; NaN equals NaN. Other leaves compare by type and
    `==`.

    Example:
        >>> tree_equal({"a": torch.ones(2)}, {"a": torch.ones(2)})
        True
    """
    left_leaves, left_structure = tree_flatten(left)
    right_leaves, right_structure = tree_flatten(right)
    return bool(left_structure == right_structure) and all(map(_leaf_equal, left_leaves, right_leaves))


def _leaf_equal(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and bool(left == right)
    if left.dtype != right.dtype or left.shape != right.shape or left.device != right.device:
        return False
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(left, right)
    if left.dtype.itemsize == 1:
        left, right = left.float(), right.float()  # torch.equal of an FP8 tensor and itself raises (torch 2.13)
    return bool(torch.equal(left, right) or torch.allclose(left, right, rtol=0, atol=0, equal_nan=True))
