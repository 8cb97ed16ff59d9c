"""Structured values at the border: one order, one rule for `None`, every container that one of the libraries knows.

torch keeps the order of a dict and counts `None` as a leaf; JAX sorts keys and drops `None`. Here the rules are those
of optree, which are JAX's: keys of a dict are sorted (an `OrderedDict` keeps its order), `None` is no leaf. A class
that only JAX or only torch knows is taken apart as that library does.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.utils._pytree as torch_pytree

from scoped_fn.state import CompilerState
from scoped_fn.state.compiler_state import NAMESPACE
from scoped_fn.state.exact import Exact

NO_CONTAINERS = (str, bytes, bytearray, memoryview, range, torch.Size)


class Static(Exact):
    """A leaf that is no array."""


@dataclass(frozen=True)
class Foreign:
    """A node that optree does not know.

    Attributes:
        spec: How its own library builds it from its children.
        build: `tree_unflatten` of that library, as (spec, children).
        children: The structure of its children, a list.
    """

    spec: Any
    build: Callable[[Any, list[Any]], Any]
    children: Structure


@dataclass(frozen=True)
class Structure:
    """How to build a structured value from its arrays; hashable, compares by value.

    Attributes:
        spec: The containers, as optree sees them.
        leaves: For each leaf: None for an array, a `Static`, or a `Foreign` node.
    """

    spec: Any
    leaves: tuple[Any, ...]


def flatten(tree: Any, is_array: Callable[[Any], bool], *, sort_keys: bool = False) -> tuple[list[Any], Structure]:
    """Returns the arrays of a structured value, in order, and the rest as a `Structure`.

    Args:
        tree: The value.
        is_array: Which leaves are arrays.
        sort_keys: Whether dicts shall have their keys sorted when the value is built anew.

    Raises:
        TypeError: There is a container that no library knows, so arrays in it would be overlooked.
    """
    found, spec = optree.tree_flatten(in_key_order(tree) if sort_keys else tree, namespace=NAMESPACE)
    arrays: list[Any] = []
    leaves: list[Any] = []
    for leaf in found:
        if is_array(leaf):
            arrays.append(leaf)
            leaves.append(None)
            continue
        node = _foreign(leaf, is_array, arrays, sort_keys)
        leaves.append(Static(checked(leaf)) if node is None else node)
    return arrays, Structure(spec, tuple(leaves))


def in_key_order(tree: Any) -> Any:
    """Returns a tree whose dicts have their keys sorted, as JAX has them: calls that are alike see them alike."""
    kind = type(tree)
    if kind in (list, tuple):
        return kind([in_key_order(child) for child in tree])
    if kind is dict and all(type(key) is str for key in tree):
        return {key: in_key_order(tree[key]) for key in sorted(tree)}
    if (
        tree is None
        or isinstance(tree, (torch.Tensor, CompilerState))
        or optree.tree_is_leaf(tree, namespace=NAMESPACE)
    ):
        return tree
    children, static, keys, build = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)
    children = [in_key_order(child) for child in children]
    if kind not in (dict, defaultdict):
        return build(static, children)
    ordered = dict(zip(keys, children, strict=True))
    return ordered if kind is dict else defaultdict(tree.default_factory, ordered)


def unflatten(structure: Structure, arrays: Sequence[Any]) -> Any:
    """Returns the structured value with these arrays."""
    return _build(structure, iter(arrays))


def tree_map_arrays(function: Callable[[Any], Any], tree: Any, is_array: Callable[[Any], bool]) -> Any:
    """Returns the tree with the function applied to its arrays and everything else as it is."""
    arrays, structure = flatten(tree, is_array)
    return unflatten(structure, [function(array) for array in arrays])


def states_of(structure: Structure, leaves: Sequence[Any]) -> list[Any]:
    """Returns the states of a structured value with these leaves."""
    tree = unflatten(structure, leaves)
    nodes = optree.tree_leaves(tree, is_leaf=lambda node: isinstance(node, CompilerState), namespace=NAMESPACE)
    return [node for node in nodes if isinstance(node, CompilerState)]


def counters_widened(structure: Structure, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors with int64 in place of int32 where they are buffers of a state, as torch counts in.

    Args:
        structure: What they are the leaves of.
        tensors: Different objects.
    """
    if all(tensor.dtype != torch.int32 for tensor in tensors):
        return tensors
    buffers = [named.values() for state in states_of(structure, tensors) for named in state.buffers.values()]
    narrow = {id(buffer) for named in buffers for buffer in named if buffer.dtype == torch.int32}
    return [tensor.long() if id(tensor) in narrow else tensor for tensor in tensors]


def places_in_states(structure: Structure, count: int, *, every: bool) -> set[int]:
    """Returns which arrays are part of a state, every one or its buffers alone.

    With x64 off JAX holds torch's counters, which are int64 buffers, as int32.
    """
    states = states_of(structure, range(count))
    if every:
        return {place for state in states for place in optree.tree_leaves(state, namespace=NAMESPACE)}
    return {place for state in states for named in state.buffers.values() for place in named.values()}


def checked(leaf: Any) -> Any:
    """Returns a leaf that is no array.

    Raises:
        TypeError: It is a module, or a container that neither optree, torch nor JAX knows.
    """
    if isinstance(leaf, torch.nn.Module):
        raise TypeError(
            f"Expected arrays, numbers, strings, None and containers of them, got the module {type(leaf).__name__}, "
            "whose tensors would be overlooked. Pass dict(module.named_parameters()), or compile it with sf.compile."
        )
    container = isinstance(leaf, (Mapping, Set, Sequence)) and not isinstance(leaf, NO_CONTAINERS)
    if container or (dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)):
        raise TypeError(
            f"Expected arrays, numbers, strings, None and containers that optree, JAX or torch know, "
            f"got a {type(leaf).__name__}. Register it, for example with jax.tree_util.register_dataclass."
        )
    return leaf


def check_static(structure: Structure, is_other: Callable[[Any], bool], what: str, convert: str) -> None:
    """Checks what is static in the arguments of a function.

    Raises:
        TypeError: It is an array of the other library, or has no hash.
    """
    for leaf in structure.leaves:
        if isinstance(leaf, Static) and is_other(leaf.value):
            raise TypeError(f"Expected {what}. Convert it first with interop.{convert}.")
    try:
        hash(structure)
    except TypeError as error:
        raise TypeError(
            f"Expected arguments of arrays and static values that hash, got one that does not: {error}. "
            "Pass numbers, strings, None, or arrays."
        ) from error


def _build(structure: Structure, arrays: Iterator[Any]) -> Any:
    values: list[Any] = []
    for leaf in structure.leaves:
        if leaf is None:
            values.append(next(arrays))
        elif isinstance(leaf, Static):
            values.append(leaf.value)
        else:
            values.append(leaf.build(leaf.spec, _build(leaf.children, arrays)))
    return optree.tree_unflatten(structure.spec, values)


def _foreign(leaf: Any, is_array: Callable[[Any], bool], arrays: list[Any], sort_keys: bool) -> Foreign | None:
    """Returns what one of the other two libraries knows a leaf as, and adds its arrays; None if it is a leaf there."""
    import jax

    if isinstance(leaf, torch.Size):  # torch would take it apart and give a tuple back
        return None
    for flatten_of, build in ((jax.tree_util.tree_flatten, jax.tree_util.tree_unflatten), _TORCH):
        children, spec = flatten_of(leaf, is_leaf=lambda node: node is not leaf)
        if len(children) != 1 or children[0] is not leaf:
            inner, structure = flatten(children, is_array, sort_keys=sort_keys)
            arrays += inner
            return Foreign(spec, build, structure)
    return None


def _build_torch(spec: Any, children: list[Any]) -> Any:
    return torch_pytree.tree_unflatten(children, spec)


_TORCH = (torch_pytree.tree_flatten, _build_torch)
