"""Structured values as flat tensors and a `Structure` that compares by value.

Containers are what `torch.utils._pytree` knows (dicts, tuples, named tuples, registered classes) and any dataclass.
Tensors are the leaves; numbers, strings, None, dtypes and the like are part of the structure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from scoped_fn._errors import SpecError

STATIC_TYPES = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type,
)  # fmt: skip


@dataclass(frozen=True)
class Static:
    """A leaf that is no tensor. Compares by type and exact value: 1, 1.0 and True are three things, NaN is one."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return _exact(self.value) == _exact(other.value)  # type: ignore[no-any-return]

    def __hash__(self) -> int:
        return hash(type(self.value))


@dataclass(frozen=True)
class Structure:
    """How to build a structured value from flat tensors.

    Attributes:
        spec: The containers.
        leaves: For each leaf: None for a tensor, a `Static`, or (dataclass, structure of its fields).
        scope: What else distinguishes calls: the autocast scope, if one is on.
        keyed: Whether a key follows the tensors, because the function draws random numbers.
    """

    spec: Any
    leaves: tuple[Any, ...]
    scope: Any = None
    keyed: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        # torch warns when the spec of a leaf is unpickled or copied (2.13), so containers travel in its place.
        containers = pytree.tree_unflatten(range(len(self.leaves)), self.spec)
        return _from_containers, (containers, self.leaves, self.scope, self.keyed)

    @property
    def num_tensors(self) -> int:
        """How many tensors it takes to build the value."""
        inner: list[int] = [leaf[1].num_tensors for leaf in self.leaves if isinstance(leaf, tuple)]
        return sum(leaf is None for leaf in self.leaves) + sum(inner)


def _from_containers(containers: Any, leaves: tuple[Any, ...], scope: Any, keyed: bool = False) -> Structure:
    return Structure(pytree.tree_structure(containers), leaves, scope, keyed)


def flatten(tree: Any, what: str, is_tensor: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """Returns the tensors of a structured value, in order, and the rest as a `Structure`.

    Args:
        tree: The value.
        what: What it is, for messages: "inputs" or "outputs".
        is_tensor: Which leaves count as tensors; `torch.Tensor` instances by default.

    Raises:
        SpecError: There is an object that is neither a tensor, nor plain data, nor a container.
    """
    # torch takes a Size apart and gives a tuple back.
    found, spec = pytree.tree_flatten(tree, is_leaf=lambda node: isinstance(node, torch.Size))
    tensors: list[Any] = []
    leaves: list[Any] = []
    for leaf in found:
        if isinstance(leaf, torch.Tensor) if is_tensor is None else is_tensor(leaf):
            tensors.append(leaf)
            leaves.append(None)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            inner, structure = flatten(_fields(leaf), what, is_tensor)
            tensors += inner
            leaves.append((type(leaf), structure))
        else:
            leaves.append(_static(leaf, what))
    return tensors, Structure(spec, tuple(leaves))


def unflatten(structure: Structure, tensors: list[Any]) -> Any:
    """Returns the structured value with these tensors as its tensor leaves."""
    return _unflatten(structure, iter(tensors))


def _unflatten(structure: Structure, tensors: Iterator[Any]) -> Any:
    values: list[Any] = []
    for leaf in structure.leaves:
        if leaf is None:
            values.append(next(tensors))
        elif isinstance(leaf, Static):
            values.append(leaf.value)
        else:
            values.append(build_dataclass(leaf[0], _unflatten(leaf[1], tensors)))
    return pytree.tree_unflatten(values, structure.spec)


def paths(tree: Any) -> list[str]:
    """Returns where each tensor of the tree is, such as `['mask']` or `[0].logits`, in the order of `flatten`."""
    return list(_paths(tree, ""))


def _paths(tree: Any, prefix: str) -> Iterator[str]:
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        name = prefix + pytree.keystr(path)
        if isinstance(leaf, torch.Tensor):
            yield name
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field, value in _fields(leaf).items():
                yield from _paths(value, f"{name}.{field}")


def _fields(instance: Any) -> dict[str, Any]:
    declared = {f.name: getattr(instance, f.name) for f in fields(instance) if hasattr(instance, f.name)}
    return {**declared, **getattr(instance, "__dict__", {})}


def build_dataclass(kind: type, values: dict[str, Any]) -> Any:
    """Builds a dataclass from its fields without running its `__init__`, which may check or change them."""
    made: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _static(leaf: Any, what: str) -> Static:
    if not isinstance(leaf, STATIC_TYPES):
        arrays = "Convert it with torch.from_numpy or interop.jax_to_torch."
        others = "Pass its tensors, or register the class with torch.utils._pytree.register_pytree_node."
        raise SpecError(
            f"Expected {what} of tensors, numbers, strings, None and containers of them, got a {type(leaf).__name__}. "
            f"{arrays if hasattr(leaf, '__array__') else others}"
        )
    return Static(leaf)


def _exact(value: Any) -> Any:
    """Returns what two equal values share and no others do: NaN is one value, 0.0 and -0.0 are two."""
    if isinstance(value, float):
        return float.hex(value)
    if isinstance(value, complex):
        return float.hex(value.real), float.hex(value.imag)
    return id(value) if isinstance(value, (enum.Enum, type)) else value
