"""Constants: facts of the outside world, by name, that belong to no owner."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import triton

import scoped_fn as sf
from tests.generators.arrays import kept
from tests.helpers import process_unchanged
from tests.state.whole import owners, whole_state

FACTS = ("torch.version", "triton.version", "cuda.version", "cuda.capability", "cublaslt.version")


def test_a_constant_is_set_replaced_and_dropped() -> None:
    state = whole_state()
    with kept(state):
        more = sf.set_constant(state, "rank", 3)
        other = sf.set_constant(more, "rank", 4)
    assert (more.constants["rank"], other.constants["rank"]) == (3, 4)
    with kept(other):
        assert sf.tree_equal(sf.drop_constant(other, "rank"), state)


def test_the_value_that_is_there_gives_the_very_same_state() -> None:
    for value in (3, None, "a", (1, ("b",)), 1.5, False):
        state = sf.set_constant(sf.init_state(), "fact", value)
        assert sf.set_constant(state, "fact", value) is state


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, False), ((1, 0), (True, False))], ids=str)
def test_equal_values_of_two_types_are_two_values(one: Any, other: Any) -> None:
    state = sf.set_constant(sf.set_constant(sf.init_state(), "fact", one), "fact", other)
    assert repr(state.constants["fact"]) == repr(other)


def test_dropping_what_is_not_there_is_refused() -> None:
    state = sf.set_constant(sf.init_state(), "fact", 1)
    with kept(state), pytest.raises(KeyError, match=r"Expected .*fact.*, got 'other'"):
        sf.drop_constant(state, "other")
    with pytest.raises(KeyError, match=r"Expected .*, got 'fact'"):
        sf.drop_constant(sf.drop_constant(state, "fact"), "fact")


@pytest.mark.parametrize("value", [[1], {}, {1}, (1, [2]), bytearray(b"a")], ids=repr)
def test_an_unhashable_value_is_refused(value: Any) -> None:
    state = sf.set_constant(sf.init_state(), "fact", 1)
    with kept(state), pytest.raises(TypeError, match=r"Expected .*hashable.*fact.*, got"):
        sf.set_constant(state, "fact", value)


@pytest.mark.parametrize("name", [None, 3, ("a",)], ids=repr)
def test_a_name_that_is_no_string_is_refused(name: Any) -> None:
    with pytest.raises(TypeError, match=r"Expected .*name.*, got"):
        sf.set_constant(sf.init_state(), name, 1)


def test_constants_are_nobodys_and_stay_over_a_release() -> None:
    state, first, second = owners("a", "b")
    state = sf.set_constant(state, "fact", 1)
    after = sf.release(sf.release(state, first), second)
    assert after.owners == {}
    assert after.constants == {"fact": 1}


def test_the_order_in_which_they_are_set_does_not_matter() -> None:
    one = sf.set_constant(sf.set_constant(sf.init_state(), "a", 1), "b", 2)
    other = sf.set_constant(sf.set_constant(sf.init_state(), "b", 2), "a", 1)
    assert sf.tree_equal(one, other)


def test_detect_fills_in_what_is_known_of_this_machine() -> None:
    state = sf.init_state()
    with kept(state), process_unchanged():
        found = sf.detect(state).constants
    assert set(found) == set(FACTS)
    assert str(found["torch.version"]) == str(torch.__version__)
    assert found["triton.version"] == triton.__version__
    assert (found["cuda.version"] is None) >= (torch.version.cuda is None)
    assert (found["cuda.capability"] is None) == (not torch.cuda.is_available())
    hash(found)


def test_detecting_twice_is_detecting_once() -> None:
    state = sf.detect(sf.init_state())
    assert sf.detect(state) is state


def test_detect_leaves_what_was_set() -> None:
    state = sf.set_constant(sf.set_constant(sf.init_state(), "cuda.capability", (10, 0)), "cublaslt.version", None)
    found = sf.detect(state)
    assert found.constants["cuda.capability"] == (10, 0)
    assert found.constants["cublaslt.version"] is None
    assert set(found.constants) == set(FACTS)
    assert sf.detect(sf.drop_constant(found, "cuda.capability")).constants["torch.version"] == str(torch.__version__)


def test_what_detect_finds_can_be_pickled_and_compared() -> None:
    state = sf.detect(whole_state())
    assert sf.tree_equal(pickle.loads(pickle.dumps(state)), state)
