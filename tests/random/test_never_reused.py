"""No key is used twice: two sites, two calls, two models and two rows never share their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import scoped_fn as sf
from tests.helpers import assert_same
from tests.random.models import compiled
from tests.random.oracle import assert_bits, drawn, keys_of

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 64

# Each gives numbers of which a uniform or normal draw can be told apart by its bits.
SITES: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(WIDTH),
    "rand_like": torch.rand_like,
    "uniform_": lambda x: torch.empty(WIDTH).uniform_(),
    "dropout": lambda x: F.dropout(torch.ones(WIDTH), 0.5),
    "randint": lambda x: torch.randint(0, 2**30, (WIDTH,)).float(),
    "bernoulli": lambda x: torch.bernoulli(torch.full((WIDTH,), 0.5)),
    "randn": lambda x: torch.randn(WIDTH),
    "randperm": lambda x: torch.randperm(WIDTH).float(),
}
NAMES = st.lists(st.sampled_from(sorted(SITES)), min_size=1, max_size=5)


def model_of(names: list[str]) -> Callable[[Tensor], list[Tensor]]:
    """A function with a draw for each name."""
    return lambda x: [SITES[name](x) for name in names]


def by_kind(names: list[str], out: list[Tensor]) -> list[tuple[str, tuple[float, ...]]]:
    """Numbers of one kind compare with one another; of two kinds they cannot be equal by accident or design."""
    kinds = {"rand_like": "rand", "uniform_": "rand"}
    return [(kinds.get(name, name), tuple(one.tolist())) for name, one in zip(names, out, strict=True)]


@settings(max_examples=15)
@given(NAMES, st.integers(0, 2**64 - 1))
def test_two_sites_and_two_calls(names: list[str], seed: int) -> None:
    state, fn = compiled(model_of(names), torch.ones(WIDTH), seed=seed)
    seen = []
    for _ in range(2):
        expected_key = keys_of(state.key, len(names) + 1)[0]
        state, out = fn(state, torch.ones(WIDTH))
        assert_bits(state.key, expected_key)
        seen += by_kind(names, out)
    assert len(set(seen)) == 2 * len(names)


@settings(max_examples=10)
@given(NAMES, NAMES, st.integers(0, 2**32 - 1))
def test_two_models_in_one_state(first: list[str], second: list[str], seed: int) -> None:
    x = torch.ones(WIDTH)
    state, one = compiled(model_of(first), x, seed=seed)
    state, other = sf.compile(state, model_of(second), (x,), backend="eager")
    seen = []
    for _ in range(2):
        for fn, names in ((one, first), (other, second)):
            state, out = fn(state, x)
            seen += by_kind(names, out)
    assert len(set(seen)) == 2 * (len(first) + len(second))


def test_what_a_model_draws_depends_on_the_state_alone() -> None:
    """Another model in the state changes the key by its calls, and by nothing else."""
    x = torch.ones(WIDTH)
    alone_state, alone = compiled(SITES["rand"], x)
    state, _ = compiled(SITES["randn"], x)
    state, fn = sf.compile(state, SITES["rand"], (x,), backend="eager")
    assert_same(fn(state, x)[1], alone(alone_state, x)[1])


def test_two_functions_given_one_state_draw_the_same_where_they_draw_alike() -> None:
    """A key is a value: who uses a state twice gets its numbers twice."""
    x = torch.ones(WIDTH)
    state, one = compiled(SITES["rand"], x)
    state, other = sf.compile(state, SITES["rand_like"], (x,), backend="eager")
    assert_same(one(state, x)[1], other(state, x)[1])


def test_the_order_of_keys_is_that_of_the_program() -> None:
    def program(x: Tensor) -> Any:
        late = torch.rand(3) if x.shape[0] > 1 else torch.zeros(3)
        unused = torch.rand(3)
        del unused
        return late, torch.rand(3)

    state, fn = compiled(program, torch.ones(2))
    after, (first, last) = fn(state, torch.ones(2))
    found = {tuple(one.tolist()) for one in (first, last)}
    keys = keys_of(state.key, 4)
    if not torch.equal(after.key, keys[0]):  # a draw that nobody uses may be left out of the graph
        keys = keys_of(state.key, 3)
    assert_bits(after.key, keys[0])
    assert found <= {tuple(drawn("uniform", key, (3,)).tolist()) for key in keys[1:]}
    assert_bits(first, drawn("uniform", keys[1], (3,)))


def test_the_last_key_of_many_calls() -> None:
    state, fn = compiled(SITES["rand"], torch.ones(WIDTH))
    key = state.key
    for _ in range(20):
        state, out = fn(state, torch.ones(WIDTH))
        key, mine = keys_of(key, 2)
        assert_bits(out, drawn("uniform", mine, (WIDTH,)))
    assert_bits(state.key, key)


def test_a_state_from_before_gives_its_numbers_again() -> None:
    state, fn = compiled(model_of(["rand", "randn"]), torch.ones(WIDTH))
    first = fn(state, torch.ones(WIDTH))
    fn(first[0], torch.ones(WIDTH))
    again = fn(state, torch.ones(WIDTH))
    assert_same(again[1], first[1])
    assert sf.tree_equal(again[0], first[0])


def test_two_shapes_are_two_variants_of_one_stream() -> None:
    state, fn = compiled(lambda x: torch.rand_like(x), torch.ones(6))
    for size in (6, 9, 6):
        _, key = keys_of(state.key, 2)
        state, out = fn(state, torch.ones(size))
        assert_bits(out, drawn("uniform", key, (size,)))
