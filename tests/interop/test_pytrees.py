"""One order of leaves, one rule for None, in every container; three registrations of a state that agree."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given
from hypothesis import strategies as st

import scoped_fn as sf
from scoped_fn.interop import from_jax, jax_to_torch, register_jax, to_jax, torch_to_jax
from scoped_fn.interop.convert import is_tensor
from scoped_fn.interop.pytrees import flatten, unflatten
from tests.interop.values import TENSORS, KnownToJax, Pair, same, trees


def _with_buffers(seed: int, sizes: list[int]) -> sf.CompilerState:
    state = sf.init_state(key=seed)
    for size in sizes:
        state, owner = sf.acquire(state, "model")
        state = sf.set_buffers(
            state, owner, {f"b{i}": torch.full((i + 1,), float(size)) for i in reversed(range(size))}
        )
    return state


STATES = st.builds(_with_buffers, st.integers(0, 2**64 - 1), st.lists(st.integers(0, 3), max_size=4))


@given(trees(TENSORS))
def test_structure_stays_exactly(tree: Any) -> None:
    with jax.enable_x64(True):
        there = torch_to_jax(tree)
        back = jax_to_torch(there)
    assert same(back, tree)


@given(trees(TENSORS))
def test_taking_apart_and_building_are_inverse(tree: Any) -> None:
    arrays, structure = flatten(tree, is_tensor)
    assert same(unflatten(structure, arrays), tree)
    again = flatten(tree, is_tensor)[1]
    assert again == structure
    assert hash(again) == hash(structure)


def test_keys_are_sorted_and_none_is_no_leaf() -> None:
    one, two = torch.ones(1), torch.ones(2)
    arrays, _ = flatten({"b": one, "a": two, "c": None}, is_tensor)
    assert [len(array) for array in arrays] == [2, 1]
    arrays, _ = flatten(collections.OrderedDict(b=one, a=two), is_tensor)
    assert [len(array) for array in arrays] == [1, 2]


def test_the_order_is_that_of_jax() -> None:
    tree = {"b": [jnp.ones(1), None], "a": Pair(jnp.ones(2), KnownToJax(jnp.ones(3), None))}
    ours = flatten(tree, lambda leaf: isinstance(leaf, jax.Array))[0]
    assert [len(array) for array in ours] == [len(array) for array in jax.tree.leaves(tree)]


def test_what_is_no_array_is_compared_exactly() -> None:
    structures = [flatten([value], is_tensor)[1] for value in (1, 1.0, True, "1", 0.0, -0.0, None)]
    assert len(set(structures)) == len(structures)
    nan = flatten([float("nan")], is_tensor)[1]
    assert nan == flatten([float("nan")], is_tensor)[1]


def test_a_container_that_nobody_knows_is_refused() -> None:
    @dataclasses.dataclass
    class Mine:
        a: torch.Tensor

    for container in (Mine(torch.ones(1)), sf.state.FrozenDict({"a": torch.ones(1)})):
        with pytest.raises(TypeError, match=r"Expected .* containers .* know, got a \w+. Register it"):
            torch_to_jax([container])


def _paths_of_optree(state: sf.CompilerState) -> list[tuple[Any, ...]]:
    return list(optree.tree_paths(state, namespace="scoped_fn"))  # type: ignore[arg-type]


def _entry(key: Any) -> Any:
    return next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))


@given(STATES)
def test_the_three_registrations_of_a_state_agree(state: sf.CompilerState) -> None:
    register_jax()
    by_optree = sf.state.tree_leaves(state)
    by_torch = torch_pytree.tree_flatten_with_path(state)[0]
    with jax.enable_x64(True):  # states hold integers of 64 bits
        arrays = torch_to_jax(state)
    by_jax = jax.tree_util.tree_flatten_with_path(arrays)[0]
    assert all(one is other for one, (_, other) in zip(by_optree, by_torch, strict=True))
    assert all(np.array_equal(one, other) for one, (_, other) in zip(by_optree, by_jax, strict=True))
    paths = [tuple(path) for path in _paths_of_optree(state)]
    assert paths == [tuple(map(_entry, path)) for path, _ in by_torch]
    assert paths == [tuple(map(_entry, path)) for path, _ in by_jax]


@given(STATES)
def test_a_state_goes_through_jax(state: sf.CompilerState) -> None:
    register_jax()
    with jax.enable_x64(True):
        arrays = torch_to_jax(state)
        same_state = jax.tree.map(lambda leaf: leaf, arrays)
        back = jax_to_torch(same_state)
    assert hash(jax.tree.structure(same_state)) == hash(jax.tree.structure(arrays))
    assert jax.tree.structure(same_state) == jax.tree.structure(arrays)
    chex.assert_trees_all_equal_structs(same_state, arrays)
    assert sf.tree_equal(back, state)


def test_names_of_buffers_have_one_order_whatever_the_order_they_came_in() -> None:
    state, owner = sf.acquire(sf.init_state(), "model")
    one, two = torch.ones(1), torch.ones(2)
    state = sf.set_buffers(state, owner, {"b": one, "a": two})
    for leaves in (sf.state.tree_leaves(state), torch_pytree.tree_leaves(state)):
        assert [len(leaf) for leaf in leaves] == [2, 1, 2]


class Batch(NamedTuple):
    features: dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OfJax:
    """A node that only JAX knows."""

    features: dict[str, Any]


WRAPPED: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "alone": lambda d: {"x": d},
    "list": lambda d: {"x": [d][0]},
    "named tuple": Batch,
    "ordered dict": lambda d: collections.OrderedDict(x=d),
    "default dict": lambda d: {"x": collections.defaultdict(int, d)},
    "mixed keys": lambda d: {"x": {1 if key == "a" else key: value for key, value in d.items()}},
    "of JAX": OfJax,
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", WRAPPED)
def test_functions_see_keys_in_one_order_whatever_was_called_before(name: str, first: int) -> None:
    def of_torch(tree: Any) -> torch.Tensor:
        return torch.cat(list((tree.features if hasattr(tree, "features") else tree["x"]).values()))

    def of_jax(tree: Any) -> jax.Array:
        return jnp.concatenate(list((tree.features if hasattr(tree, "features") else tree["x"]).values()))

    dicts = [{"b": jnp.ones(1), "a": jnp.zeros(1)}, {"a": jnp.zeros(1), "b": jnp.ones(1)}]
    trees = [WRAPPED[name](dicts[i]) for i in (first, 1 - first)]
    there, back = to_jax(of_torch), from_jax(of_jax)
    jitted = there if name == "mixed keys" else jax.jit(there)  # JAX refuses to sort those
    for tree in trees:
        assert there(tree).tolist() == jitted(tree).tolist() == back(jax_to_torch(tree)).tolist() == [0.0, 1.0]
