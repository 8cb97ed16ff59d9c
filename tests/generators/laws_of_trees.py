"""Laws of trees and of states as trees: taking apart, mapping, copying, comparing."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex  # type: ignore[import-untyped]
import jax
import torch
from torch.utils import _pytree as torch_pytree

import scoped_fn as sf
from tests.generators.arrays import assert_same_bits, bits, static_of

PICKLED = {
    torch.complex64,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.uint8,
    torch.int64,
}


def map_leaves(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    return sf.state.tree_map(change, tree)


# Trees: of three registries, each gives back what it took apart.


def by_optree(tree: Any) -> None:
    leaves, structure = sf.state.tree_flatten(tree)
    assert_same_bits(sf.state.tree_unflatten(structure, leaves), tree)
    assert sf.state.tree_structure(tree) == structure
    assert hash(structure) == hash(sf.state.tree_structure(tree))


def by_torch(tree: Any) -> None:
    leaves, structure = torch_pytree.tree_flatten(tree)
    assert_same_bits(torch_pytree.tree_unflatten(leaves, structure), tree)
    assert torch_pytree.tree_structure(tree) == structure


def by_jax(tree: Any) -> None:
    leaves, structure = jax.tree_util.tree_flatten(tree)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert_same_bits(jax.tree_util.tree_unflatten(structure, leaves), tree)
    chex.assert_trees_all_equal_structs(jax.tree.map(bits, tree), jax.tree.map(bits, tree))
    assert hash(structure) == hash(jax.tree_util.tree_structure(tree))


def registries_agree(tree: Any) -> None:
    """optree and JAX: one order, and None is no leaf."""
    ours, theirs = sf.state.tree_leaves(tree), jax.tree_util.tree_leaves(tree)
    assert len(ours) == len(theirs)
    assert all(one is other for one, other in zip(ours, theirs, strict=True))


def torch_has_the_same_leaves(tree: Any) -> None:
    """torch keeps the order of dicts and counts None; else it sees the very same tensors."""
    ours, theirs = sf.state.tree_leaves(tree), torch_pytree.tree_leaves(tree)
    assert sorted(map(id, ours)) == sorted(id(leaf) for leaf in theirs if leaf is not None)


def map_of_identity(tree: Any) -> None:
    mapped = map_leaves(lambda leaf: leaf, tree)
    assert_same_bits(mapped, tree)
    assert all(one is other for one, other in zip(*map(sf.state.tree_leaves, (mapped, tree)), strict=True))


def map_of_a_composition(tree: Any) -> None:
    twice = map_leaves(lambda leaf: torch.stack([leaf]), map_leaves(lambda leaf: leaf[None], tree))
    assert_same_bits(twice, map_leaves(lambda leaf: torch.stack([leaf[None]]), tree))


def travels(tree: Any) -> None:
    for twin in (copy.deepcopy(tree), map_leaves(torch.clone, tree)):
        assert_same_bits(twin, tree)
        assert sf.tree_equal(twin, tree)


def saves(state: sf.CompilerState) -> None:
    """A file has all of a state; its tensors alone, put into another of its kind, give it back too."""
    with tempfile.TemporaryDirectory() as folder:
        sf.save({"state": state, "step": 3}, Path(folder) / "run.safetensors")
        found = sf.load(Path(folder) / "run.safetensors")
    assert found["step"] == 3
    for twin in (found["state"], sf.from_tensors(map_leaves(torch.zeros_like, state), sf.to_tensors(state))):
        assert_same_bits(twin, state)
        assert static_of(twin) == static_of(state)


def pickles(state: sf.CompilerState) -> None:
    """Of the dtypes that torch can unpickle (2.13): no FP8, no unsigned integers of more than 8 bits but the key."""
    plain = map_leaves(lambda leaf: leaf if leaf.dtype in PICKLED else leaf.to(torch.float64), state)
    state = replace(plain, key=state.key)
    twin = pickle.loads(pickle.dumps(state))
    assert_same_bits(twin, state)
    assert static_of(twin) == static_of(state)


# tree_equal is an equivalence, and means what the comparison by bits means.


def equal_to_itself(tree: Any) -> None:
    twins = [map_leaves(torch.clone, tree) for _ in range(2)]
    assert sf.tree_equal(tree, tree)
    assert sf.tree_equal(twins[0], tree)
    assert sf.tree_equal(tree, twins[0])
    assert sf.tree_equal(twins[0], twins[1])


def other_leaf_other_tree(tree: Any) -> None:
    leaves, structure = sf.state.tree_flatten(tree)
    for place, leaf in enumerate(leaves):
        for other in (torch.cat([leaf.reshape(-1), leaf.reshape(-1)]), leaf[None], leaf.to(torch.complex128)):
            changed = sf.state.tree_unflatten(structure, [*leaves[:place], other, *leaves[place + 1 :]])
            alike = other.shape == leaf.shape and other.dtype == leaf.dtype
            assert sf.tree_equal(changed, tree) == sf.tree_equal(tree, changed) == alike


def never_raises(tree: Any) -> None:
    for other in ([tree], None, torch.ones(2), sf.init_state()):
        assert isinstance(sf.tree_equal(tree, other), bool)
    assert isinstance(repr(tree), str)
