"""What each random operation of a compiled model gives, by the formulas of docs: with JAX's functions and our keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.helpers import process_unchanged
from tests.random.draws import Draw
from tests.random.draws_dropout import DROPOUTS
from tests.random.draws_numbers import FLOATS
from tests.random.draws_several import ALL, SEVERAL
from tests.random.oracle import assert_bits, assert_near, drawn, keys_of

pytestmark = pytest.mark.usefixtures("one_thread")

OF_INDUCTOR = [
    draw for draw in ALL if draw.name in {"dropout torch.float32", "several", "randint", "normal_", "Dropout2d"}
]


def compiled(draw: Draw, x: torch.Tensor, seed: int = 5, **options: Any) -> tuple[Any, Any]:
    """The state and compiled function of a draw, as a function of a state and a tensor."""
    state, fn = sf.compile(sf.init_state(key=seed), draw.function, (x,), **{"backend": "eager", **options})
    if isinstance(draw.function, nn.Module):
        return state, lambda state, x: fn(state, fn.params, x)
    return state, fn


def assert_value(draw: Draw, out: Any, expected: Any) -> None:
    """Equal, by as many roundings as the draw allows."""
    outs, expecteds = (one if isinstance(one, tuple) else (one,) for one in (out, expected))
    for one, other in zip(outs, expecteds, strict=True):
        if draw.epsilons:
            assert_near(one.detach(), other, draw.epsilons)
        else:
            assert_bits(one.detach(), other)


def check(draw: Draw, x: torch.Tensor, **options: Any) -> None:
    """Two calls in a row: each value, and the key after each."""
    state, fn = compiled(draw, x, **options)
    for _ in range(2):
        key, *keys = keys_of(state.key, draw.draws + 1)
        before = state
        state, out = fn(state, x)
        assert_value(draw, out, draw.expected(x.detach(), *keys))
        assert_bits(state.key, key)
        assert_bits(before.key, before.key.clone())


@pytest.mark.parametrize("draw", ALL, ids=lambda draw: draw.name)
def test_a_draw(draw: Draw) -> None:
    stream = torch.get_rng_state()
    check(draw, draw.x)
    assert torch.equal(stream, torch.get_rng_state()), "torch's generator moved"


@pytest.mark.parametrize("draw", [*DROPOUTS, *SEVERAL], ids=lambda draw: draw.name)
def test_a_draw_in_training(draw: Draw) -> None:
    if draw.name != "native_dropout":
        check(draw, draw.x.clone().requires_grad_())


@pytest.mark.parametrize("draw", [*DROPOUTS[:3], *FLOATS[:3], *SEVERAL], ids=lambda draw: draw.name)
def test_a_draw_that_is_captured_by_tracing(draw: Draw) -> None:
    check(draw, draw.x, capture="trace")


@pytest.mark.parametrize("draw", OF_INDUCTOR, ids=lambda draw: draw.name)
def test_a_draw_under_inductor(draw: Draw) -> None:
    check(draw, draw.x, backend="inductor")


def test_compiling_draws_nothing_and_moves_nothing() -> None:
    with process_unchanged():
        state, _ = compiled(SEVERAL[0], SEVERAL[0].x)
    assert_bits(state.key, sf.init_state(key=5).key)


QUIET: dict[str, Any] = {
    "dropout in evaluation": nn.Dropout(0.5).eval(),
    "dropout by argument": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
    "probability zero": lambda x: torch.nn.functional.dropout(x, 0.0, training=True),
    "rrelu in evaluation": nn.RReLU().eval(),
    "attention without dropout": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "an LSTM without dropout": nn.LSTM(4, 3, num_layers=2),
    "nothing random": torch.sin,
}


@pytest.mark.parametrize("name", QUIET)
def test_a_call_that_draws_nothing_leaves_the_key(name: str) -> None:
    x = torch.randn(3, 2, 4)
    state, fn = compiled(Draw(name, QUIET[name], lambda x: x, x), x)
    after, _ = fn(state, x)
    assert after.key is state.key


def test_a_key_of_the_state_may_be_any_key() -> None:
    draw, (_, other) = SEVERAL[0], keys_of(sf.random.key(3), 2)
    state, fn = compiled(draw, draw.x)
    following, *keys = keys_of(other, 4)
    after, out = fn(replace(state, key=other), draw.x)
    assert_value(draw, out, draw.expected(draw.x, *keys))
    assert_bits(after.key, following)


def test_attention_of_many_heads_drops_its_weights_with_one_key() -> None:
    """Its operation j draws with key j of its own key; the weights that come out are the dropped ones."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    x = torch.randn(3, 5, 8)
    options = {"average_attn_weights": False}
    state, fn = sf.compile(sf.init_state(key=5), attention.train(), (x, x, x), options, backend="eager")
    after, (_, weights) = fn(state, fn.params, x, x, x, **options)
    following, key = keys_of(state.key, 2)
    whole = attention.eval()(x, x, x, **options)[1].detach()
    kept = drawn("bernoulli", keys_of(key, 1)[0], 0.7, (6, 5, 5)).view(3, 2, 5, 5)
    assert_near(weights.detach(), torch.where(kept, whole / 0.7, 0.0), 20)
    assert_bits(after.key, following)


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize("draws", [False, True], ids=["without a draw", "with a draw"])
def test_an_argument_may_be_called_key(draws: bool, capture: str) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        weights = (query @ key.T).softmax(-1)
        return (nn.functional.dropout(weights, 0.5) if draws else weights) @ value

    x = torch.randn(4, 4)
    state, fn = sf.compile(sf.init_state(key=5), attend, (x, x + 1, x + 2), backend="eager", capture=capture)
    after, out = fn(state, x, x + 1, x + 2)
    assert (after.key is state.key) != draws
    weights = (x @ (x + 1).T).softmax(-1)
    if draws:
        weights = torch.where(drawn("bernoulli", keys_of(state.key, 2)[1], 0.5, (4, 4)), weights * 2, 0.0)
    torch.testing.assert_close(out, weights @ (x + 2))


def test_branches_draw_from_keys_too() -> None:
    def branching(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x - torch.rand_like(x), (x,))

    x = torch.ones(6)
    state, fn = sf.compile(sf.init_state(key=5), branching, (x,), backend="eager")
    with process_unchanged():
        after, up = fn(state, x)
        _, down = fn(state, -x)
        _, later = fn(after, x)
    assert torch.equal(fn(state, x)[1], up)
    assert not torch.equal(later, up)
    assert ((up - 1 >= 0) & (up - 1 < 1)).all()
    assert ((down + 1 <= 0) & (down + 1 > -1)).all()
