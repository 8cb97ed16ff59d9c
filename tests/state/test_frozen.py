"""A state and everything in it refuses assignment; it prints, copies and pickles like any value."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import jax
import numpy as np
import pytest
import torch

import scoped_fn as sf
from scoped_fn.state import FrozenDict, Owner, set_buffers


def _state_with_buffers() -> sf.CompilerState:
    state, owner = sf.acquire(sf.init_state(key=3), "encoder")
    return set_buffers(state, owner, {"norm.running_mean": torch.arange(40.0), "norm.count": torch.tensor(2)})


@pytest.mark.parametrize("field", ["owners", "next_token", "buffers", "key"])
def test_no_field_can_be_assigned(field: str) -> None:
    state = _state_with_buffers()
    with pytest.raises(dataclasses.FrozenInstanceError, match=field):
        setattr(state, field, None)
    with pytest.raises(dataclasses.FrozenInstanceError, match=field):
        delattr(state, field)


def test_owners_and_buffers_refuse_items() -> None:
    state = _state_with_buffers()
    with pytest.raises(TypeError, match="does not support item assignment"):
        state.owners[0] = Owner("other")  # type: ignore[index]
    with pytest.raises(TypeError, match="does not support item assignment"):
        state.buffers[0] = FrozenDict()  # type: ignore[index]
    with pytest.raises(TypeError, match="does not support item assignment"):
        state.buffers[0]["norm.count"] = torch.tensor(3)  # type: ignore[index]
    with pytest.raises(TypeError, match="support item deletion"):
        del state.buffers[0]  # type: ignore[attr-defined]


def test_a_frozen_dict_keeps_no_tie_to_its_source() -> None:
    source = {"a": 1}
    frozen = FrozenDict(source)
    source["a"] = 2
    assert frozen == {"a": 1}
    assert frozen.set("a", 3) == {"a": 3}
    assert frozen.drop("a") == {}
    assert frozen == {"a": 1}
    with pytest.raises(AttributeError, match="Expected no change"):
        frozen._entries = {}


def test_an_owner_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="name"):
        Owner("encoder").name = "decoder"  # type: ignore[misc]


def test_repr_names_owner_and_shapes_but_no_values() -> None:
    text = repr(_state_with_buffers())
    assert "encoder" in text
    assert "norm.running_mean" in text
    assert "40" in text
    assert "float32" in text
    assert "tensor(" not in text
    assert len(text) < 400


def test_repr_of_many_buffers_stays_short() -> None:
    state, owner = sf.acquire(sf.init_state(), "deep")
    state = set_buffers(state, owner, {f"layers.{index}.mean": torch.zeros(8) for index in range(500)})
    assert len(repr(state)) < 1000


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31, 2**32 - 1])
def test_key_holds_the_words_of_a_jax_key(seed: int) -> None:
    expected = np.asarray(jax.random.PRNGKey(seed))
    state = sf.init_state(key=seed)
    assert state.key.dtype is torch.uint32
    np.testing.assert_array_equal(state.key.numpy(), expected)


def test_key_keeps_the_high_word_of_a_large_seed() -> None:
    with jax.enable_x64(True):
        expected = np.asarray(jax.random.PRNGKey(2**40 + 7))
    np.testing.assert_array_equal(sf.init_state(key=2**40 + 7).key.numpy(), expected)


def test_key_from_a_tensor_is_a_copy() -> None:
    words = torch.tensor([5, 9], dtype=torch.uint32)
    state = sf.init_state(key=words)
    words[0] = 6
    assert state.key.tolist() == [5, 9]


@pytest.mark.parametrize(
    "key", [-1, 2**64, 1.5, True, "0", torch.zeros(2), torch.zeros(3, dtype=torch.uint32)], ids=repr
)
def test_a_bad_key_is_refused(key: object) -> None:
    with pytest.raises(ValueError, match=r"Expected a (seed|key).*got"):
        sf.init_state(key=key)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy.copy, lambda state: pickle.loads(pickle.dumps(state))],
    ids=["deep", "copy", "pickle"],
)
def test_a_copy_is_equal(duplicate: object) -> None:
    state = _state_with_buffers()
    assert sf.tree_equal(duplicate(state), state)  # type: ignore[operator]


def test_a_deep_copy_holds_its_own_tensors() -> None:
    state = _state_with_buffers()
    twin = copy.deepcopy(state)
    twin.buffers[0]["norm.count"].add_(1)
    assert state.buffers[0]["norm.count"].item() == 2


def test_a_pickle_can_be_loaded_by_torch(tmp_path: object) -> None:
    state = _state_with_buffers()
    leaves, structure = sf.state.tree_flatten(state)
    path = tmp_path / "leaves.pt"  # type: ignore[operator]
    torch.save(leaves, path)
    assert sf.tree_equal(sf.state.tree_unflatten(structure, torch.load(path, weights_only=True)), state)
