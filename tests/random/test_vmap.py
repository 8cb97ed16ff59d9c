"""Random numbers of compiled functions under vmap: an error, the same for all, or of each index's own key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

import scoped_fn as sf
from tests.compose.quiet import QUIET
from tests.helpers import assert_same
from tests.random.models import compiled
from tests.random.oracle import assert_bits, folded, keys_of

pytestmark = QUIET
EVERY = 0xFFFFFFFF
ROWS = torch.linspace(-1, 2, 20, dtype=torch.float64).reshape(5, 4)
ROW = ROWS[0]


def drawing(x: Tensor) -> Tensor:
    """Dropout and noise."""
    return F.dropout(x, 0.5) * 3 + torch.rand_like(x)


@pytest.fixture(scope="module")
def pair() -> Any:
    """A state and a compiled function that draws twice."""
    return compiled(drawing, ROW)


def of_row(state: sf.CompilerState, row: int) -> sf.CompilerState:
    """The state whose key is the one that an index draws from."""
    return replace(state, key=folded(folded(state.key, EVERY), row))


def plain(pair: Any) -> Callable[..., Any]:
    state, fn = pair
    return lambda x: fn(state, x)[1]


def by_rows(pair: Any, rows: Tensor = ROWS) -> Tensor:
    """What "different" must give, one call after another."""
    state, fn = pair
    return torch.stack([fn(of_row(state, index), row)[1] for index, row in enumerate(rows)])


def test_random_operations_are_refused_by_default(pair: Any) -> None:
    state, fn = pair
    with pytest.raises(RuntimeError, match=r"(?i)random"):
        vmap(plain(pair))(ROWS)
    with pytest.raises(RuntimeError, match=r"(?i)random"):
        sf.vmap(fn)(state, ROWS)
    assert_bits(plain(pair)(ROW), plain(pair)(ROW))


@pytest.mark.parametrize("in_dims", [0, None], ids=["mapped", "shared"])
def test_the_same_numbers_for_all(pair: Any, in_dims: int | None) -> None:
    given = ROWS if in_dims == 0 else ROW
    mapped = lambda x, _: plain(pair)(x)  # noqa: E731
    found = vmap(mapped, (in_dims, 0), randomness="same")(given, torch.arange(5))
    assert_same(found, torch.stack([plain(pair)(row) for row in given.expand(5, 4)]))


@pytest.mark.parametrize("in_dims", [0, None], ids=["mapped", "shared"])
def test_numbers_of_their_own(pair: Any, in_dims: int | None) -> None:
    given = ROWS if in_dims == 0 else ROW
    mapped = lambda x, _: plain(pair)(x)  # noqa: E731
    found = vmap(mapped, (in_dims, 0), randomness="different")(given, torch.arange(5))
    assert_same(found, by_rows(pair, given.expand(5, 4)))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_the_key_that_comes_out_is_that_of_one_call(pair: Any, randomness: str) -> None:
    state, fn = pair
    after, out = sf.vmap(fn, randomness=randomness)(state, ROWS)
    assert_bits(after.key, keys_of(state.key, 3)[0])
    assert sf.tree_equal(after, fn(state, ROW)[0])
    expected = by_rows(pair) if randomness == "different" else torch.stack([plain(pair)(row) for row in ROWS])
    assert_same(out, expected)
    again, more = sf.vmap(fn, randomness=randomness)(after, ROWS)
    assert not torch.equal(more, out)
    assert_bits(again.key, keys_of(after.key, 3)[0])


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_chunks_change_nothing(pair: Any, randomness: str, chunk_size: int) -> None:
    state, fn = pair
    whole = sf.vmap(fn, randomness=randomness)(state, ROWS)
    chunked = sf.vmap(fn, randomness=randomness, chunk_size=chunk_size)(state, ROWS)
    assert_same(chunked[1], whole[1])
    assert sf.tree_equal(chunked[0], whole[0])


def test_chunks_of_torchs_vmap_that_would_repeat_are_refused(pair: Any) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"(?s)Expected .*chunk_size.*, got .*sf\.vmap"):
        vmap(plain(pair), randomness="different", chunk_size=2)(ROWS)
    same = vmap(plain(pair), randomness="same", chunk_size=2)(ROWS)
    assert_same(same, vmap(plain(pair), randomness="same")(ROWS))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_dimension(pair: Any, dim: int) -> None:
    state, fn = pair
    given = ROWS.movedim(0, dim)
    assert_same(vmap(plain(pair), (dim,), randomness="different")(given), by_rows(pair))
    assert_same(vmap(plain(pair), (dim,), dim, randomness="different")(given), by_rows(pair).movedim(0, dim))
    assert_same(sf.vmap(fn, (dim,), randomness="different")(state, given)[1], by_rows(pair))


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_a_state_for_each_index_is_used_as_it_is(pair: Any, randomness: str) -> None:
    state, fn = pair
    states = [replace(state, key=key) for key in sf.random.split(sf.random.key(8), 5)]
    stacked = sf.state.tree_map(lambda *leaves: torch.stack(leaves), *states)
    after, out = sf.vmap(fn, state_dim=0, randomness=randomness)(stacked, ROWS)
    alone = [fn(one, row) for one, row in zip(states, ROWS, strict=True)]
    assert_same(out, torch.stack([one for _, one in alone]))
    assert_bits(after.key, torch.stack([one.key for one, _ in alone]))


def test_a_key_for_each_index_is_used_as_it_is(pair: Any) -> None:
    state, fn = pair
    keys = sf.random.split(sf.random.key(8), 5)
    found = vmap(lambda key, x: fn(replace(state, key=key), x)[1])(keys, ROWS)
    assert_same(found, torch.stack([fn(replace(state, key=k), x)[1] for k, x in zip(keys, ROWS, strict=True)]))


@pytest.mark.parametrize(
    ("outer", "inner", "distinct"),
    [("same", "same", 1), ("same", "different", 3), ("different", "same", 2), ("different", "different", 6)],
)
def test_two_levels(pair: Any, outer: str, inner: str, distinct: int) -> None:
    x = ROW.expand(2, 3, 4)
    found = vmap(vmap(plain(pair), randomness=inner), randomness=outer)(x)
    assert len({tuple(row.tolist()) for row in found.reshape(6, 4)}) == distinct
    if (outer, inner) == ("same", "different"):
        assert_same(found[0], by_rows(pair, x[0]))
    if (outer, inner) == ("different", "same"):
        assert_same(found[:, 0], by_rows(pair, x[:, 0]))
    assert_same(vmap(vmap(plain(pair), randomness=inner), randomness=outer)(x), found)


def test_two_levels_of_stateful_vmaps(pair: Any) -> None:
    state, fn = pair
    both = sf.vmap(sf.vmap(fn, randomness="different"), randomness="different")
    after, out = both(state, ROW.expand(2, 3, 4))
    assert len({tuple(row.tolist()) for row in out.reshape(6, 4)}) == 6
    assert_bits(after.key, keys_of(state.key, 3)[0])


def test_a_level_that_refuses_is_asked_even_inside_one_that_does_not(pair: Any) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)random"):
        vmap(vmap(plain(pair), randomness="different"))(ROW.expand(2, 3, 4))
    with pytest.raises(RuntimeError, match=r"(?i)random"):
        vmap(vmap(plain(pair)), randomness="different")(ROW.expand(2, 3, 4))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_of_each_row_belong_to_its_numbers(pair: Any, randomness: str) -> None:
    state, fn = pair
    loss = lambda x: plain(pair)(x).square().sum()  # noqa: E731
    found = vmap(grad(loss), randomness=randomness)(ROWS)
    rows = [of_row(state, index) if randomness == "different" else state for index in range(5)]
    expected = [grad(lambda x, one=one: fn(one, x)[1].square().sum())(row) for one, row in zip(rows, ROWS, strict=True)]
    assert_same(found, torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_a_gradient_of_a_vmap(pair: Any) -> None:
    state, fn = pair
    found = grad(lambda x: vmap(plain(pair), randomness="different")(x).square().sum())(ROWS)
    rows = [(of_row(state, index), row) for index, row in enumerate(ROWS)]
    expected = [grad(lambda x, one=one: fn(one, x)[1].square().sum())(row) for one, row in rows]
    assert_same(found, torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_autograd_through_a_vmap(pair: Any) -> None:
    x = ROWS.clone().requires_grad_()
    vmap(plain(pair), randomness="different")(x).square().sum().backward()
    assert_same(
        x.grad, grad(lambda x: vmap(plain(pair), randomness="different")(x).square().sum())(ROWS), rtol=1e-12,
        atol=1e-12,
    )  # fmt: skip


@settings(max_examples=15)
@given(st.integers(0, 2**64 - 1), st.integers(1, 6))
def test_no_two_rows_and_no_two_calls_share_a_number(pair: Any, seed: int, count: int) -> None:
    state, fn = pair
    state, seen = replace(state, key=sf.random.key(seed)), []
    for _ in range(2):
        seen += [tuple(row.tolist()) for row in vmap(plain((state, fn)), randomness="different")(ROW.expand(count, 4))]
        seen.append(tuple(fn(state, ROW)[1].tolist()))
        state, _ = fn(state, ROW)
    assert len(set(seen)) == 2 * (count + 1)


def test_under_inductor_the_rows_are_the_same() -> None:
    pairs = [compiled(drawing, ROW, backend=backend) for backend in ("eager", "inductor")]
    for randomness in ("same", "different"):
        one, other = (vmap(plain(pair), randomness=randomness)(ROWS) for pair in pairs)
        assert_same(one, other, rtol=1e-12, atol=1e-12)


def test_a_vmap_inside_the_model() -> None:
    """The model maps a function that draws: torch's own rule says which numbers are apart; ours come from keys."""
    for randomness, distinct in (("same", 1), ("different", 5)):
        inside = lambda x, r=randomness: vmap(lambda x: torch.rand_like(x), randomness=r)(x)  # noqa: E731
        state, fn = compiled(inside, ROWS)
        after, out = fn(state, ROWS)
        assert len({tuple(row.tolist()) for row in out}) == distinct
        assert_same(fn(state, ROWS)[1], out)
        assert not torch.equal(fn(after, ROWS)[1], out)
