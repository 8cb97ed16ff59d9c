"""A state with something of everything is a tree like any other, and goes through pickles."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import chex  # type: ignore[import-untyped]
import optree
import pytest
import torch
from torch.utils import _pytree as torch_pytree

import scoped_fn as sf
from tests.generators.arrays import arrays_of, kept, static_of
from tests.state.whole import leaves_of, whole_state


def by_optree(state: Any) -> Any:
    leaves, structure = sf.state.tree_flatten(state)
    return sf.state.tree_unflatten(structure, leaves)


def by_torch(state: sf.CompilerState) -> Any:
    return torch_pytree.tree_unflatten(*torch_pytree.tree_flatten(state))


ROUND_TRIPS = {
    "optree": by_optree,
    "torch": by_torch,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "optree map": lambda state: sf.state.tree_map(torch.clone, state),
    "torch map": lambda state: torch_pytree.tree_map(torch.clone, state),
}


@pytest.mark.parametrize("trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_a_round_trip_keeps_everything(trip: Any) -> None:
    state = whole_state()
    with kept(state):
        twin = trip(state)
    assert isinstance(twin, sf.CompilerState)
    assert sf.tree_equal(twin, state)
    assert static_of(twin) == static_of(state)
    chex.assert_trees_all_equal(arrays_of(twin), arrays_of(state))


@pytest.mark.parametrize("trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_what_comes_back_can_go_on(trip: Any) -> None:
    state, twin = whole_state(), trip(whole_state())
    results = []
    for one in (state, twin):
        one, taken = sf.take_inputs(one, 0)
        one = sf.close_frame(one, sf.Frame(0, one.owners[0].frames[0]))
        after, spec = sf.take_inputs(one, 0)
        assert isinstance(spec, sf.InputSpec)
        results.append((taken, tuple(sf.materialize(spec)), sf.release(after, 0)))
    assert sf.tree_equal(results[0], results[1])


def test_leaves_are_the_tensors_and_nothing_else() -> None:
    state = whole_state()
    x = torch.full((3,), 5.0)
    more = sf.push_inputs(state, 1, (x, 3))
    for leaves in (leaves_of(more), torch_pytree.tree_leaves(more)):
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        assert sum(leaf is x for leaf in leaves) == 1
        assert len(leaves) == len(leaves_of(state)) + 1


def test_a_map_reaches_the_queued_tensors() -> None:
    state: Any = whole_state()
    maps: list[Any] = [
        sf.state.tree_map(torch.zeros_like, state),
        torch_pytree.tree_map(torch.zeros_like, state),
        optree.tree_map(torch.zeros_like, state, namespace="scoped_fn"),
    ]
    for mapped in maps:
        _, (inputs, kwargs) = sf.take_inputs(mapped, 0)
        assert inputs[0].tolist() == [[0.0] * 3] * 2
        assert inputs[1] == 5
        assert not kwargs["mask"].any()
        assert static_of(mapped) == static_of(state)


def test_paths_name_where_each_leaf_is() -> None:
    texts = [torch_pytree.keystr(path) for path, _ in torch_pytree.tree_flatten_with_path(whole_state())[0]]
    assert sum("inputs" in text for text in texts) == 4, "two queued, and the ids that the spec keeps"
    assert len(set(texts)) == len(texts)


CHANGES = {
    "override": lambda state: sf.set_override(state, 1, "torch._dynamo.config.recompile_limit", 9),
    "dropped override": lambda state: sf.drop_override(state, 1, "torch._dynamo.config.recompile_limit"),
    "constant": lambda state: sf.set_constant(state, "cuda.capability", (9, 0)),
    "dropped constant": lambda state: sf.drop_constant(state, "cuda.capability"),
    "opened": lambda state: sf.open_frame(state, 1)[0],
    "closed": lambda state: sf.close_frame(state, sf.Frame(1, 0)),
    "pushed": lambda state: sf.push_inputs(state, 0, (torch.ones(2),)),
    "taken": lambda state: sf.take_inputs(state, 0)[0],
    "released": lambda state: sf.release(state, 0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_change_is_seen_by_structure_and_equality(change: Any) -> None:
    state: Any = whole_state()
    with kept(state):
        changed = change(state)
    assert not sf.tree_equal(changed, state)
    assert not sf.tree_equal(state, changed)
    assert sf.state.tree_structure(changed) != sf.state.tree_structure(state)
    assert torch_pytree.tree_structure(changed) != torch_pytree.tree_structure(state)


def test_a_state_prints_in_a_few_lines_what_its_owners_hold() -> None:
    text = repr(whole_state())
    assert "encoder" in text
    assert "max_autotune=True" in text
    assert "ub.fprop.is_fp8" in text
    assert "tensor(" not in text
    assert len(text) < 2000


def test_releasing_every_owner_leaves_the_constants_and_the_counter() -> None:
    state = whole_state()
    empty = sf.release(sf.release(state, 0), 1)
    assert not any((empty.owners, empty.buffers, empty.fp8, empty.overrides, empty.inputs))
    assert empty.constants == state.constants
    assert empty.next_token == state.next_token
    assert len(leaves_of(empty)) == 1
