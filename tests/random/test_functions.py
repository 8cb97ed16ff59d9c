"""Each function of `sf.random` gives what JAX's gives: bit for bit, but where a logarithm or a tangent comes in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import scoped_fn as sf
from tests.random import oracle, threefry
from tests.random.oracle import FLOATS, INTEGERS, assert_bits, assert_near, assert_ulps, drawn
from tests.random.strategies import FEW, KEYS, SHAPES

Shape = tuple[int, ...]
PROBABILITIES = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 0.1]), st.floats(0, 1))
# XLA's log1p in float64 is off by about a hundred units in the last place.
EPSILONS = {("exponential", torch.float64): 256.0}
# XLA's inverse error function in float64 is off by thousands of units in the last place, torch's by 3.
NORMAL_ULPS = {torch.float64: 2**14}


@pytest.mark.parametrize("dtype", oracle.BITS, ids=str)
@FEW
@given(KEYS, SHAPES)
def test_bits(dtype: torch.dtype, key: torch.Tensor, shape: Shape) -> None:
    found = sf.random.bits(key, shape, dtype)
    assert_bits(found, drawn("bits", key, shape, dtype=dtype))
    assert_bits(found, oracle.to_torch(threefry.bits(key.numpy(), shape, dtype.itemsize * 8)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@FEW
@given(KEYS, SHAPES)
def test_uniform(dtype: torch.dtype, key: torch.Tensor, shape: Shape) -> None:
    found = sf.random.uniform(key, shape, dtype)
    assert_bits(found, drawn("uniform", key, shape, dtype=dtype))
    assert not found.numel() or (found.min() >= 0 and found.max() < 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@FEW
@given(KEYS, *[st.floats(-50, 50).map(lambda bound: round(bound, 3) + 0.0)] * 2)  # XLA makes zeros of subnormal numbers
def test_uniform_between_bounds(dtype: torch.dtype, key: torch.Tensor, low: float, high: float) -> None:
    found = sf.random.uniform(key, (40,), dtype, low, high)
    bounds: dict[str, Any] = {"dtype": dtype, "minval": low, "maxval": high}
    assert_bits(found, drawn("uniform", key, (40,), **bounds, one_by_one=dtype == torch.float64))
    step = torch.finfo(dtype).eps * max(abs(low), abs(high), torch.finfo(dtype).tiny)
    torch.testing.assert_close(found, drawn("uniform", key, (40,), **bounds), rtol=0, atol=2 * step)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.complex128], ids=str)
@FEW
@given(KEYS, SHAPES)
def test_normal_within_one_ulp(dtype: torch.dtype, key: torch.Tensor, shape: Shape) -> None:
    found, expected = sf.random.normal(key, shape, dtype), drawn("normal", key, shape, dtype=dtype)
    if dtype.is_complex:
        assert found.dtype == expected.dtype
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    assert_ulps(found, expected, NORMAL_ULPS.get(found.dtype, 1))


@pytest.mark.parametrize("name", ["exponential", "gumbel", "cauchy"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@FEW
@given(KEYS, SHAPES)
def test_of_a_logarithm_or_tangent(name: str, dtype: torch.dtype, key: torch.Tensor, shape: Shape) -> None:
    found = getattr(sf.random, name)(key, shape, dtype)
    assert_near(found, drawn(name, key, shape, dtype=dtype), EPSILONS.get((name, dtype), 8.0))


@FEW
@given(KEYS, PROBABILITIES, SHAPES)
def test_bernoulli_of_a_number(key: torch.Tensor, p: float, shape: Shape) -> None:
    assert_bits(sf.random.bernoulli(key, p, shape), drawn("bernoulli", key, p, shape))
    assert_bits(sf.random.bernoulli(key, p), drawn("bernoulli", key, p))


def test_bernoulli_of_a_number_draws_float32_whatever_the_default() -> None:
    key = sf.random.key(3)
    torch.set_default_dtype(torch.float64)
    try:
        found = sf.random.bernoulli(key, 0.3, (500,))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_bits(found, drawn("bernoulli", key, 0.3, (500,)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@FEW
@given(KEYS, st.sampled_from([(), (0,), (7,), (3, 4), (2**16 + 3,)]))
def test_bernoulli_of_a_tensor(dtype: torch.dtype, key: torch.Tensor, shape: Shape) -> None:
    p = drawn("uniform", (5, 6), shape, dtype=dtype)
    wide = dtype in oracle.WIDE
    assert_bits(sf.random.bernoulli(key, p), drawn("bernoulli", key, p, wide=wide))
    if p.numel() < 1000:
        larger = (3, *shape)
        assert_bits(sf.random.bernoulli(key, p, larger), drawn("bernoulli", key, p, larger, wide=wide))


@st.composite
def spans(draw: st.DrawFn) -> tuple[torch.dtype, int, int]:
    """An integer dtype, and two bounds of which the second may be the first one too large, or below the first."""
    dtype = draw(st.sampled_from(INTEGERS))
    info = torch.iinfo(dtype)
    top = info.max + (dtype not in (torch.int64, torch.int32))  # one above is no number of the dtype: all are drawn
    ends = st.one_of(st.sampled_from([info.min, info.max, 0, 1]), st.integers(info.min, info.max))
    return dtype, draw(ends), draw(st.one_of(st.just(top), ends))


@FEW
@given(KEYS, SHAPES, spans())
def test_randint(key: torch.Tensor, shape: Shape, span: tuple[torch.dtype, int, int]) -> None:
    dtype, low, high = span
    found = sf.random.randint(key, shape, low, high, dtype)
    assert_bits(found, drawn("randint", key, shape, low, high, dtype=dtype))
    assert not found.numel() or high <= low or (low <= found.long().min() and found.long().max() < high)


def test_randint_is_int64_by_default() -> None:
    key = sf.random.key(4)
    assert_bits(sf.random.randint(key, (9,), -5, 2**40), drawn("randint", key, (9,), -5, 2**40, dtype=torch.int64))


@FEW
@given(KEYS, st.one_of(st.integers(0, 40), st.sampled_from([1625, 1626, 70000])))
def test_a_permuted_range(key: torch.Tensor, size: int) -> None:
    found = sf.random.permutation(key, size)
    assert_bits(found, drawn("permutation", key, size, wide=True))


@FEW
@given(KEYS, st.integers(1, 3), st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_a_permuted_tensor(key: torch.Tensor, rank: int, sizes: list[int]) -> None:
    shape = tuple(sizes[:rank])
    x = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    for dim in range(-rank, rank):
        assert_bits(sf.random.permutation(key, x, dim), drawn("permutation", key, x, dim))


COUNTS = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint64]


@pytest.mark.parametrize("dtype", COUNTS, ids=str)
@FEW
@given(KEYS, SHAPES, st.one_of(st.floats(0.01, 0.99), st.floats(-30, 0).map(math.exp), st.sampled_from([0.0, 1.0])))
def test_geometric(dtype: torch.dtype, key: torch.Tensor, shape: Shape, p: float) -> None:
    expected = drawn("geometric", key, np.float32(p), shape, dtype=dtype)
    assert_bits(sf.random.geometric(key, torch.tensor(p), shape, dtype), expected)
    assert_bits(sf.random.geometric(key, p, shape, dtype), expected)


@pytest.mark.parametrize("sizes", [(), (100,), (1000, 1), (1000, 100)], ids=str)
def test_rare_successes_of_any_shape_are_those_of_jax(sizes: Shape) -> None:
    key, p = sf.random.key(3), torch.full(sizes, 1e-6)
    expected = drawn("geometric", key, p, (1000, 100), dtype=torch.int32)
    assert_bits(sf.random.geometric(key, p, (1000, 100), torch.int32), expected)


@pytest.mark.parametrize("p_dtype", [torch.float32, torch.float64], ids=str)
@FEW
@given(KEYS)
def test_geometric_of_a_tensor(p_dtype: torch.dtype, key: torch.Tensor) -> None:
    p = torch.tensor([[0.2], [0.9]], dtype=p_dtype)
    assert_counts(sf.random.geometric(key, p), drawn("geometric", key, p, dtype=torch.int64))
    assert_counts(sf.random.geometric(key, p, (2, 30)), drawn("geometric", key, p, (2, 30), dtype=torch.int64))


def assert_counts(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same counts, but for a few at which the quotient of two logarithms lies on the border of two integers."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    away = (actual - expected).abs()
    assert away.count_nonzero() <= 1 + expected.numel() // 1000
    assert not away.numel() or away.max() <= 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@FEW
@given(KEYS, st.integers(0, 2), st.sampled_from([(1, 5), (3, 2)]))
def test_categorical(dtype: torch.dtype, key: torch.Tensor, dim: int, sizes: Shape) -> None:
    logits = drawn("normal", (1, 2), (4, *sizes), dtype=dtype)
    options: dict[str, Any] = {"wide": True}
    batch = tuple(size for place, size in enumerate(logits.shape) if place != dim)
    assert_choices(sf.random.categorical(key, logits, dim), drawn("categorical", key, logits, dim, **options))
    assert_choices(
        sf.random.categorical(key, logits, dim - 3, (3, *batch)),
        drawn("categorical", key, logits, dim - 3, (3, *batch), **options),
    )


@FEW
@given(KEYS, st.integers(1, 6))
def test_categorical_without_replacement(key: torch.Tensor, count: int) -> None:
    logits = drawn("normal", (1, 2), (2, 6))
    found = sf.random.categorical(key, logits, shape=(count, 2), replace=False)
    assert_bits(found, drawn("categorical", key, logits, -1, (count, 2), False, wide=True).long())
    assert all(len(set(found[:, row].tolist())) == count for row in range(2))


def assert_choices(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same choices, but for a rare one between two whose scores are apart by a rounding."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert (actual != expected).count_nonzero() <= expected.numel() // 50


@pytest.mark.parametrize("name", ["uniform", "normal", "exponential", "gumbel", "cauchy"])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_no_dtype_is_the_default_dtype(name: str, default: torch.dtype) -> None:
    key, function = sf.random.key(1), getattr(sf.random, name)
    torch.set_default_dtype(default)
    try:
        found, alone = function(key, (3,)), function(key)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_bits(found, function(key, (3,), default))
    assert_bits(alone, function(key, (), default))
