"""A state is a tree whose leaves are tensors, in optree and in torch; equality goes by structure and leaves."""

from __future__ import annotations

from dataclasses import replace

import chex
import numpy as np
import optree
import pytest
import torch
from hypothesis import given
from torch.utils import _pytree as torch_pytree

import scoped_fn as sf
from scoped_fn.state import set_buffers
from tests.generators.arrays import arrays_of, static_of
from tests.generators.operations import STATES


def _build(names: list[str], sizes: list[int], seed: int = 0) -> sf.CompilerState:
    state = sf.init_state(key=seed)
    for name, size in zip(names, sizes, strict=True):
        state, owner = sf.acquire(state, name)
        buffers = {f"buffer_{index}": torch.full((index + 1,), float(size)) for index in range(size)}
        state = set_buffers(state, owner, buffers)
    return state


@given(STATES)
def test_leaves_are_tensors_only(state: sf.CompilerState) -> None:
    for leaves in (sf.state.tree_leaves(state), torch_pytree.tree_leaves(state)):
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        assert len(leaves) == len(arrays_of(state))


@given(STATES)
def test_map_changes_leaves_and_keeps_the_static_part(state: sf.CompilerState) -> None:
    zeros = {path: np.zeros_like(array) for path, array in arrays_of(state).items()}
    for mapped in (
        sf.state.tree_map(torch.zeros_like, state),
        torch_pytree.tree_map(torch.zeros_like, state),
        optree.tree_map(torch.zeros_like, state, namespace="scoped_fn"),
    ):
        assert static_of(mapped) == static_of(state)
        chex.assert_trees_all_equal(arrays_of(mapped), zeros)


@given(STATES)
def test_structure_compares_by_value(state: sf.CompilerState) -> None:
    zeros = sf.state.tree_map(torch.zeros_like, state)
    assert sf.state.tree_structure(zeros) == sf.state.tree_structure(state)
    assert hash(sf.state.tree_structure(zeros)) == hash(sf.state.tree_structure(state))
    assert torch_pytree.tree_structure(zeros) == torch_pytree.tree_structure(state)
    grown, _ = sf.acquire(state, "one more")
    assert sf.state.tree_structure(grown) != sf.state.tree_structure(state)
    assert torch_pytree.tree_structure(grown) != torch_pytree.tree_structure(state)


def test_leaf_paths_carry_the_names() -> None:
    state = _build(["encoder"], [2])
    with_paths = torch_pytree.tree_flatten_with_path(state)[0]
    texts = [torch_pytree.keystr(path) for path, _ in with_paths]
    assert any("buffer_1" in text for text in texts)
    assert any("key" in text for text in texts)


def test_a_state_goes_through_torch_func() -> None:
    state = _build(["encoder"], [2])
    stacked = torch_pytree.tree_map(lambda leaf: torch.stack([leaf, leaf]), state)

    def total(one: sf.CompilerState) -> torch.Tensor:
        return sum((leaf.sum() for leaf in one.buffers[0].values()), torch.zeros(()))

    np.testing.assert_array_equal(torch.func.vmap(total)(stacked).numpy(), [6.0, 6.0])


def test_a_state_moves_to_another_device() -> None:
    moved = sf.state.tree_map(lambda leaf: leaf.to("meta"), _build(["encoder"], [1]))
    assert {leaf.device.type for leaf in sf.state.tree_leaves(moved)} == {"meta"}


@pytest.mark.parametrize(
    "other",
    [
        lambda state: replace(state, key=torch.tensor([0, 1], dtype=torch.uint32)),
        lambda state: replace(state, next_token=state.next_token + 1),
        lambda state: sf.acquire(state, "more")[0],
        lambda state: sf.release(state, 0),
        lambda state: set_buffers(state, 0, {"buffer_0": torch.ones(1)}),
        lambda state: set_buffers(state, 0, {"buffer_0": torch.full((1,), 2.0), "other": torch.full((2,), 2.0)}),
        lambda state: sf.state.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, state),
        lambda state: sf.state.tree_map(lambda leaf: leaf.reshape(1, -1), state),
    ],
    ids=["key", "token", "owner", "released", "fewer", "renamed", "dtype", "shape"],
)
def test_any_difference_is_seen(other: object) -> None:
    state = _build(["encoder"], [2])
    assert not sf.tree_equal(state, other(state))  # type: ignore[operator]
    assert not sf.tree_equal(other(state), state)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.uint32, torch.bfloat16,
                                   torch.float8_e4m3fn, torch.complex64], ids=str)  # fmt: skip
def test_equality_works_for_every_dtype(dtype: torch.dtype) -> None:
    one, other = torch.tensor([0, 1]).to(dtype), torch.tensor([0, 0]).to(dtype)
    assert sf.tree_equal([one], [one.clone()])
    assert not sf.tree_equal([one], [other])
    assert sf.tree_equal([one], [one]), "the very same tensor"


def test_nan_equals_nan() -> None:
    assert sf.tree_equal([torch.tensor([float("nan"), 1.0])], [torch.tensor([float("nan"), 1.0])])


def test_comparing_and_hashing_states_never_raises() -> None:
    state, twin = _build(["encoder"], [2]), _build(["encoder"], [2])
    assert state == state
    assert isinstance(state == twin, bool)
    assert hash(state) == hash(state)
