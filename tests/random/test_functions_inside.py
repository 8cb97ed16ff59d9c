"""Functions of keys inside compiled functions and transforms give the numbers that they give outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jvp, vmap

import scoped_fn as sf
from tests.compose.quiet import QUIET
from tests.helpers import process_unchanged
from tests.random import oracle
from tests.random.oracle import assert_bits, assert_near, keys_of, to_torch
from tests.random.strategies import KEYS

pytestmark = QUIET
KEY = sf.random.key(11)
PROBABILITIES = torch.tensor([0.1, 0.5, 0.9])
LOGITS = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.5, 0.0]])

EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "split": lambda key: sf.random.split(key, 3),
    "fold_in": lambda key: sf.random.fold_in(key, 9),
    "bits": lambda key: sf.random.bits(key, (5, 2)),
    "bits64": lambda key: sf.random.bits(key, (5,), torch.uint64),
    "uniform": lambda key: sf.random.uniform(key, (70,)),
    "uniform float64": lambda key: sf.random.uniform(key, (7, 3), torch.float64),
    "uniform bfloat16": lambda key: sf.random.uniform(key, (21,), torch.bfloat16, -1.0, 2.0),
    "uniform between": lambda key: sf.random.uniform(key, (300,), torch.float32, -1.3, 2.7),
    "bernoulli": lambda key: sf.random.bernoulli(key, 0.3, (40,)),
    "bernoulli of a tensor": lambda key: sf.random.bernoulli(key, PROBABILITIES, (9, 3)),
    "randint": lambda key: sf.random.randint(key, (40,), -3, 1000),
    "randint int32": lambda key: sf.random.randint(key, (40,), -3, 10, torch.int32),
    "permutation": lambda key: sf.random.permutation(key, 12),
    "permuted rows": lambda key: sf.random.permutation(key, LOGITS, 1),
    "two steps": lambda key: sf.random.uniform(sf.random.fold_in(sf.random.split(key)[1], 4), (6,)),
}
NEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda key: sf.random.normal(key, (50,)),
    "normal float64": lambda key: sf.random.normal(key, (50,), torch.float64),
    "normal complex": lambda key: torch.view_as_real(sf.random.normal(key, (50,), torch.complex64)),
    "exponential": lambda key: sf.random.exponential(key, (50,)),
    "gumbel": lambda key: sf.random.gumbel(key, (50,)),
    "cauchy": lambda key: sf.random.cauchy(key, (50,)),
}
MOSTLY: dict[str, Callable[[Tensor], Tensor]] = {
    "geometric": lambda key: sf.random.geometric(key, PROBABILITIES, (9, 3)),
    "categorical": lambda key: sf.random.categorical(key, LOGITS, shape=(20, 2)),
}
ALL = EXACT | NEAR | MOSTLY
FOR_INDUCTOR = ["uniform", "uniform between", "bernoulli", "randint", "permutation", "two steps", "normal", "gumbel"]


def same(name: str, actual: Tensor, expected: Tensor, epsilons: float = 8.0) -> None:
    """Bit for bit, but where logarithms and the like are computed in another way."""
    if name in NEAR:
        assert_near(actual, expected, epsilons)
    else:
        assert_bits(actual, expected)


@pytest.mark.parametrize("name", ALL)
def test_in_a_compiled_function(name: str) -> None:
    state, fn = sf.compile(sf.init_state(), ALL[name], (KEY,), backend="eager")
    for key in (KEY, sf.random.key(2**40)):
        with process_unchanged():
            after, out = fn(state, key)
        same(name, out, ALL[name](key), 0.0)
        assert after.key is state.key, "what draws from keys of its own leaves the state's"


@pytest.mark.parametrize("name", FOR_INDUCTOR)
def test_under_inductor(name: str) -> None:
    state, fn = sf.compile(sf.init_state(), ALL[name], (KEY,), backend="inductor")
    same(name, fn(state, KEY)[1], ALL[name](KEY))


@pytest.mark.parametrize("name", ["uniform", "bernoulli", "split", "normal"])
def test_in_torch_compile(name: str) -> None:
    with torch.no_grad():
        out = torch.compile(ALL[name], backend="eager", fullgraph=True)(KEY)
    same(name, out, ALL[name](KEY))


@pytest.mark.parametrize("name", ALL)
def test_vmap_over_keys(name: str) -> None:
    keys = sf.random.split(KEY, 4)
    rows = vmap(ALL[name])(keys)
    for row, key in zip(rows, keys, strict=True):
        same(name, row, ALL[name](key))


@pytest.mark.parametrize("name", ["uniform", "bernoulli", "split", "randint", "two steps"])
def test_two_vmaps_over_keys(name: str) -> None:
    keys = sf.random.split(KEY, 6).view(2, 3, 2)
    rows = vmap(vmap(ALL[name]))(keys)
    for i in range(2):
        for j in range(3):
            same(name, rows[i, j], ALL[name](keys[i, j]))
    inner_out = vmap(vmap(ALL[name], in_dims=1))(keys.movedim(1, 2))
    assert_bits(inner_out, rows)


@settings(max_examples=10)
@given(KEYS, st.integers(1, 5))
def test_vmap_over_keys_is_jaxs(key: Tensor, count: int) -> None:
    keys = keys_of(key, count)
    of_jax = jax.vmap(lambda words: jax.random.uniform(jax.random.wrap_key_data(words), (3,)))(keys.numpy())
    assert_bits(vmap(lambda key: sf.random.uniform(key, (3,)))(keys), to_torch(of_jax))
    numbers = torch.arange(count)
    folded = vmap(lambda number: sf.random.fold_in(key, number))(numbers)
    assert_bits(folded, torch.stack([oracle.folded(key, number) for number in range(count)]))


def test_a_compiled_function_of_a_key_under_vmap() -> None:
    state, fn = sf.compile(sf.init_state(), EXACT["uniform"], (KEY,), backend="eager")
    keys = sf.random.split(KEY, 3)
    rows = vmap(lambda key: fn(state, key)[1])(keys)
    assert_bits(rows, torch.stack([EXACT["uniform"](key) for key in keys]))


def test_a_derivative_goes_past_a_draw() -> None:
    scale = torch.tensor(3.0, dtype=torch.float64)
    sample = lambda scale: (scale * sf.random.normal(KEY, (5,), torch.float64)).sum()  # noqa: E731
    slope = sf.random.normal(KEY, (5,), torch.float64).sum()
    torch.testing.assert_close(grad(sample)(scale), slope)
    torch.testing.assert_close(jvp(sample, (scale,), (torch.ones_like(scale),))[1], slope)


def test_no_generator_is_moved_and_no_result_asks_for_gradients() -> None:
    for function in ALL.values():
        stream: Any = torch.get_rng_state()
        assert not function(KEY).requires_grad
        assert torch.equal(stream, torch.get_rng_state())


def test_under_another_default_device_and_in_other_modes() -> None:
    expected = sf.random.uniform(KEY, (9,))
    with torch.inference_mode():
        assert_bits(sf.random.uniform(KEY.clone(), (9,)).clone(), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_bits(sf.random.uniform(KEY, (9,)), expected)
        assert_bits(sf.random.normal(KEY, (9,)), sf.random.normal(KEY, (9,)))
