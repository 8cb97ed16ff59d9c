"""Keys: from a seed, from one another, and from a state."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import scoped_fn as sf
from tests.generators.arrays import kept
from tests.helpers import process_unchanged
from tests.random import oracle, threefry
from tests.random.oracle import assert_bits
from tests.random.strategies import KEYS, SEEDS
from tests.state.whole import whole_state


@given(SEEDS)
def test_a_key_of_a_seed(seed: int) -> None:
    assert_bits(sf.random.key(seed), oracle.key_words(seed))
    assert_bits(sf.init_state(key=seed).key, oracle.key_words(seed))


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1])
def test_a_state_begins_with_jaxs_key(seed: int) -> None:
    words = np.asarray(jax.random.key_data(jax.random.key(seed)))
    np.testing.assert_array_equal(sf.init_state(key=seed).key.numpy(), words)


@given(KEYS, st.one_of(st.integers(0, 12), st.just(70000)))
def test_split(key: torch.Tensor, num: int) -> None:
    assert_bits(sf.random.split(key, num), oracle.keys_of(key, num))


@given(KEYS)
def test_two_keys_by_default(key: torch.Tensor) -> None:
    assert_bits(sf.random.split(key), oracle.keys_of(key, 2))
    assert_bits(sf.random.split(key), oracle.to_torch(threefry.split(key.numpy(), 2)))


@given(KEYS, st.one_of(st.sampled_from([0, 1, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1)))
def test_fold_in(key: torch.Tensor, data: int) -> None:
    expected = oracle.folded(key, data)
    assert_bits(sf.random.fold_in(key, data), expected)
    assert_bits(sf.random.fold_in(key, torch.tensor(data)), expected)
    assert_bits(sf.random.fold_in(key, torch.tensor(data, dtype=torch.uint32)), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_fold_in_of_a_tensor_of_any_integer_dtype(dtype: torch.dtype) -> None:
    key = sf.random.key(3)
    assert_bits(sf.random.fold_in(key, torch.tensor(101, dtype=dtype)), oracle.folded(key, 101))


def test_the_short_names_are_the_same_functions() -> None:
    assert sf.split is sf.random.split
    assert sf.fold_in is sf.random.fold_in


def test_the_next_key() -> None:
    state = whole_state()
    with kept(state), process_unchanged():
        after, key = sf.next_key(state)
    following, expected = oracle.keys_of(state.key, 2)
    assert_bits(after.key, following)
    assert_bits(key, expected)
    back = sf.state.tree_map(lambda leaf: state.key if leaf is after.key else leaf, after)
    assert sf.tree_equal(back, state), "only the key is another"


def test_keys_that_are_asked_for_one_after_another_never_repeat() -> None:
    state, seen = sf.init_state(key=1), set()
    for _ in range(50):
        state, key = sf.next_key(state)
        seen |= {tuple(key.tolist()), tuple(state.key.tolist())}
    assert len(seen) == 100


def test_a_key_is_not_written_to() -> None:
    key = sf.random.key(5)
    for call in (sf.random.split, sf.random.bits, lambda key: sf.random.fold_in(key, 3), sf.random.normal):
        call(key)
        assert key.tolist() == [0, 5]


SEEDS_THAT_ARE_NONE: list[Any] = [-1, 2**64, 1.5, "0", None, True, torch.zeros(2)]


@pytest.mark.parametrize("seed", SEEDS_THAT_ARE_NONE, ids=repr)
def test_a_bad_seed_is_refused(seed: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"Expected a (seed|key).*, got .*\."):
        sf.random.key(seed)


KEYS_THAT_ARE_NONE: dict[str, Any] = {
    "an int": 7,
    "a float tensor": torch.zeros(2),
    "an int64 tensor": torch.zeros(2, dtype=torch.int64),
    "three words": torch.zeros(3, dtype=torch.uint32),
    "no dimension": torch.tensor(3, dtype=torch.uint32),
    "None": None,
    "a list": [0, 1],
}
OF_A_KEY: dict[str, Any] = {
    "split": lambda key: sf.random.split(key),
    "fold_in": lambda key: sf.random.fold_in(key, 1),
    "bits": lambda key: sf.random.bits(key, (2,)),
    "uniform": lambda key: sf.random.uniform(key, (2,)),
    "normal": lambda key: sf.random.normal(key, (2,)),
    "bernoulli": lambda key: sf.random.bernoulli(key, 0.5, (2,)),
    "randint": lambda key: sf.random.randint(key, (2,), 0, 3),
    "permutation": lambda key: sf.random.permutation(key, 3),
    "exponential": lambda key: sf.random.exponential(key, (2,)),
    "gumbel": lambda key: sf.random.gumbel(key, (2,)),
    "cauchy": lambda key: sf.random.cauchy(key, (2,)),
    "geometric": lambda key: sf.random.geometric(key, 0.5, (2,)),
    "categorical": lambda key: sf.random.categorical(key, torch.zeros(3)),
}


@pytest.mark.parametrize("call", OF_A_KEY.values(), ids=OF_A_KEY)
@pytest.mark.parametrize("key", KEYS_THAT_ARE_NONE.values(), ids=KEYS_THAT_ARE_NONE)
def test_what_is_no_key_is_refused(call: Any, key: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"(?s)Expected .*key.*, got .*\."):
        call(key)


KEY = torch.tensor([0, 7], dtype=torch.uint32)
BAD: dict[str, Any] = {
    "split into -1": lambda: sf.random.split(KEY, -1),
    "split into 1.5": lambda: sf.random.split(KEY, 1.5),  # type: ignore[arg-type]
    "fold in -1": lambda: sf.random.fold_in(KEY, -1),
    "fold in 2**32": lambda: sf.random.fold_in(KEY, 2**32),
    "fold in a float": lambda: sf.random.fold_in(KEY, 1.0),  # type: ignore[arg-type]
    "fold in a float tensor": lambda: sf.random.fold_in(KEY, torch.tensor(1.0)),
    "fold in two": lambda: sf.random.fold_in(KEY, torch.tensor([1, 2])),
    "bits of floats": lambda: sf.random.bits(KEY, (2,), torch.float32),
    "bits of a negative shape": lambda: sf.random.bits(KEY, (-2,)),
    "uniform integers": lambda: sf.random.uniform(KEY, (2,), torch.int32),
    "uniform of a negative shape": lambda: sf.random.uniform(KEY, (-1,)),
    "normal integers": lambda: sf.random.normal(KEY, (2,), torch.int64),
    "exponential integers": lambda: sf.random.exponential(KEY, (2,), torch.int64),
    "gumbel integers": lambda: sf.random.gumbel(KEY, (2,), torch.int64),
    "cauchy integers": lambda: sf.random.cauchy(KEY, (2,), torch.int64),
    "randint floats": lambda: sf.random.randint(KEY, (2,), 0, 3, torch.float32),
    "bernoulli integers": lambda: sf.random.bernoulli(KEY, torch.tensor([1])),
    "bernoulli of another shape": lambda: sf.random.bernoulli(KEY, torch.rand(3), (2, 4)),
    "permutation of -1": lambda: sf.random.permutation(KEY, -1),
    "permutation of a number": lambda: sf.random.permutation(KEY, torch.tensor(1.0)),
    "permutation along 2": lambda: sf.random.permutation(KEY, torch.ones(2, 2), 2),
    "categorical along 1": lambda: sf.random.categorical(KEY, torch.zeros(3), 1),
    "categorical of another shape": lambda: sf.random.categorical(KEY, torch.zeros(2, 3), shape=(5,)),
    "a shape of floats": lambda: sf.random.normal(KEY, (2.5,)),  # type: ignore[arg-type]
    "a shape of truth": lambda: sf.random.uniform(KEY, (True,)),
    "a shape of an array": lambda: sf.random.uniform(KEY, np.array([2, 3])),  # type: ignore[arg-type]
    "a shape that is none": lambda: sf.random.uniform(KEY, "ab"),
    "a dtype of NumPy": lambda: sf.random.normal(KEY, (2,), np.float32),  # type: ignore[arg-type]
    "the name of a dtype": lambda: sf.random.uniform(KEY, (2,), "float32"),  # type: ignore[arg-type]
    "randint of a name": lambda: sf.random.randint(KEY, (2,), 0, 3, "int32"),  # type: ignore[arg-type]
    "randint with bounds of floats": lambda: sf.random.randint(KEY, (2,), 0.0, 3.0),  # type: ignore[arg-type]
    "randint with the shape last": lambda: sf.random.randint(KEY, 0, 10, (3,)),  # type: ignore[arg-type]
    "bernoulli with the shape first": lambda: sf.random.bernoulli(KEY, (5,), 0.5),  # type: ignore[arg-type]
    "geometric with the shape first": lambda: sf.random.geometric(KEY, (5,), 0.5),  # type: ignore[arg-type]
    "categorical of NumPy": lambda: sf.random.categorical(KEY, np.zeros(3)),  # type: ignore[arg-type]
    "categorical of nothing": lambda: sf.random.categorical(KEY, torch.zeros(0)),
    "categorical of integers": lambda: sf.random.categorical(KEY, torch.zeros(3, dtype=torch.int64)),
    "a next key of a key": lambda: sf.next_key(KEY),  # type: ignore[arg-type]
    "too many numbers of 64 bits": lambda: sf.random.bits(KEY, (2**16, 2**16), torch.uint64),
    "too many keys": lambda: sf.split(KEY, 2**33),
    "too many doubles": lambda: sf.random.uniform(KEY, (2**16, 2**16), torch.float64),
    "a seed of NumPy": lambda: sf.init_state(key=np.int64(3)),  # type: ignore[arg-type]
    "a key of JAX": lambda: sf.init_state(key=jax.random.key(3)),  # type: ignore[arg-type]
    "too many choices": lambda: sf.random.categorical(KEY, torch.zeros(3), shape=(4,), replace=False),
}


def test_a_shape_may_be_one_size() -> None:
    for draw in (sf.random.normal, sf.random.uniform, sf.random.bits):
        assert torch.equal(draw(KEY, 3), draw(KEY, (3,)))  # type: ignore[operator]
        assert torch.equal(draw(KEY, (np.int64(3),)), draw(KEY, (3,)))  # type: ignore[operator]
    assert torch.equal(
        sf.random.randint(KEY, (9,), np.int64(2), np.int32(7)),  # type: ignore[arg-type]
        sf.random.randint(KEY, (9,), 2, 7),
    )
    assert torch.equal(sf.random.bernoulli(KEY, np.float32(0.5), (9,)), sf.random.bernoulli(KEY, 0.5, (9,)))  # type: ignore[arg-type]


@pytest.mark.parametrize("call", BAD.values(), ids=BAD)
def test_a_bad_argument_is_refused_in_words(call: Any) -> None:
    with pytest.raises((ValueError, TypeError, IndexError), match=r"(?s)Expected .*, got .*\."):
        call()
