"""Laws, and the generators whose values each must hold for. `tests/test_laws.py` runs every pair once.

To add a law, write a function of one generated value that asserts, and put it into `LAWS` with the names of generators.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chex  # type: ignore[import-untyped]
import jax
import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils import _pytree as torch_pytree

import scoped_fn as sf
from tests.generators.arrays import arrays_of, assert_same_bits, bits, kept, static_of
from tests.generators.operations import HISTORIES, OPERATIONS, STATES, Operation, run, twin_of
from tests.generators.trees import TREES, TREES_WITH_NONE

GENERATORS: dict[str, st.SearchStrategy[Any]] = {
    "trees": TREES,
    "trees with None": TREES_WITH_NONE,
    "states": STATES,
    "histories": HISTORIES,
    "operations": st.tuples(STATES, OPERATIONS),
}


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


@dataclass(frozen=True)
class Law:
    """Something that holds for every value of some generators.

    Attributes:
        name: What it says.
        of: The generators, by name.
        check: Asserts it of one value.
        examples: How many values are tried.
    """

    name: str
    of: tuple[str, ...]
    check: Callable[[Any], None]
    examples: int = 30


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


# Operations: pure, and what they give depends on nothing else.


def leaves_its_state_untouched(given: tuple[sf.CompilerState, Operation]) -> None:
    state, change = given
    with kept(state):
        after = change(state)
    assert isinstance(after, sf.CompilerState)
    assert after.next_token >= state.next_token
    assert all(isinstance(leaf, torch.Tensor) for leaf in sf.state.tree_leaves(after))


def gives_the_same_again(given: tuple[sf.CompilerState, Operation]) -> None:
    state, change = given
    once = change(state)
    for other in (change(state), change(twin_of(state))):
        assert_same_bits(other, once)
        assert sf.tree_equal(other, once)


def nothing_changed_is_the_very_state(given: tuple[sf.CompilerState, Operation]) -> None:
    state, change = given
    after = change(state)
    if sf.tree_equal(after, state) and change.name not in NEW_TENSORS:
        assert after is state


def others_keep_their_very_tensors(given: tuple[sf.CompilerState, Operation]) -> None:
    """What an operation is not about stays, not only in value but as the same tensors."""
    state, change = given
    after = change(state)
    for owner in set(state.owners) & set(after.owners) - {_subject(state, change)}:
        for field in ("buffers", "inputs"):
            before, now = getattr(state, field).get(owner), getattr(after, field).get(owner)
            assert before is now or before == now


def _subject(state: sf.CompilerState, change: Operation) -> int:
    owners = sorted(state.owners)
    return owners[change.pick % len(owners)] if owners else -1


NEW_TENSORS = {"set_buffers", "add_fp8", "update_scales"}  # equal numbers in tensors of their own


# States that come of sequences of operations.


def a_twin_goes_the_same_way(history: list[Operation]) -> None:
    assert_same_bits(run(sf.init_state(key=1), history), run(sf.init_state(key=1), history))


def old_states_stay(history: list[Operation]) -> None:
    states = [sf.init_state(key=1)]
    was = [(arrays_of(states[0]), static_of(states[0]))]
    for one in history:
        states.append(one(states[-1]))
        was.append((arrays_of(states[-1]), static_of(states[-1])))
    for state, (arrays, static) in zip(states, was, strict=True):
        chex.assert_trees_all_equal(arrays_of(state), arrays)
        assert static_of(state) == static


def acquire_then_release(state: sf.CompilerState) -> None:
    after, token = sf.acquire(state, "guest")
    assert token not in state.owners
    assert token == state.next_token
    full = sf.set_override(
        sf.push_inputs(after, token, (torch.ones(2),)), token, "torch._dynamo.config.recompile_limit", 5
    )
    full, _ = sf.open_frame(sf.set_buffers(full, token, {"mean": torch.ones(1)}), token)
    for one in (after, full):
        assert_same_bits(replace(sf.release(one, token), next_token=state.next_token), state)


def releasing_all_leaves_what_is_nobodys(state: sf.CompilerState) -> None:
    empty = state
    for owner in list(state.owners):
        empty = sf.release(empty, owner)
    assert not any((empty.owners, empty.buffers, empty.fp8, empty.overrides, empty.inputs))
    assert (empty.constants, empty.autocast, empty.next_token) == (state.constants, state.autocast, state.next_token)
    assert_same_bits(empty.key, state.key)


def order_of_releases_does_not_matter(state: sf.CompilerState) -> None:
    forth, back = state, state
    for owner in sorted(state.owners):
        forth = sf.release(forth, owner)
    for owner in sorted(state.owners, reverse=True):
        back = sf.release(back, owner)
    assert_same_bits(forth, back)


def keys_follow_one_another(state: sf.CompilerState) -> None:
    after, key = sf.next_key(state)
    both = sf.split(state.key)
    np.testing.assert_array_equal(bits(torch.stack([after.key, key])), bits(both))
    assert_same_bits(replace(after, key=state.key), state)


LAWS = (
    Law("optree gives back what it took apart", ("trees", "trees with None", "states"), by_optree),
    Law("torch gives back what it took apart", ("trees", "trees with None", "states"), by_torch),
    Law("JAX gives back what it took apart", ("trees", "trees with None", "states"), by_jax),
    Law("optree and JAX see the same leaves in one order", ("trees", "trees with None", "states"), registries_agree),
    Law("torch sees the same leaves", ("trees", "trees with None", "states"), torch_has_the_same_leaves),
    Law("the map of the identity is the identity", ("trees", "trees with None", "states"), map_of_identity),
    Law("the map of a composition is that of the maps", ("trees", "states"), map_of_a_composition),
    Law("copies are equal", ("trees", "trees with None", "states"), travels),
    Law("pickles are equal", ("states",), pickles),
    Law("what is saved is loaded", ("states",), saves),
    Law("tree_equal is an equivalence", ("trees", "trees with None", "states"), equal_to_itself),
    Law("tree_equal sees every leaf", ("trees", "states"), other_leaf_other_tree),
    Law("tree_equal never raises", ("trees", "trees with None", "states"), never_raises),
    Law("an operation leaves its state untouched", ("operations",), leaves_its_state_untouched, 100),
    Law("an operation gives the same again", ("operations",), gives_the_same_again, 100),
    Law("nothing changed gives the very state", ("operations",), nothing_changed_is_the_very_state, 100),
    Law("an operation is about one owner", ("operations",), others_keep_their_very_tensors, 100),
    Law("a sequence gives the same again", ("histories",), a_twin_goes_the_same_way),
    Law("old states stay", ("histories",), old_states_stay),
    Law("release undoes acquire", ("states",), acquire_then_release),
    Law("releasing all leaves what is nobody's", ("states",), releasing_all_leaves_what_is_nobodys),
    Law("releases commute", ("states",), order_of_releases_does_not_matter),
    Law("the next key is a split", ("states",), keys_follow_one_another),
)
