"""XLA's logarithms and inverse error function on a CPU: against JAX, without a compiler, on any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn.kernels import xla_erf_inv, xla_log, xla_log1p, xla_math_cpu

TINY = float(np.finfo(np.float32).tiny)
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
FUNCTIONS = {
    "log": (xla_log, jnp.log, (0.0, 3e38)),
    "log1p": (xla_log1p, jnp.log1p, (-1.0, 0.0)),
    "erf_inv": (xla_erf_inv, jax.scipy.special.erfinv, (-BELOW_ONE, BELOW_ONE)),
}
EACH = pytest.mark.parametrize("name", FUNCTIONS)
Function = Callable[[torch.Tensor], torch.Tensor]


def ends(name: str) -> torch.Tensor:
    """The numbers around every place where a formula changes, and at the ends."""
    low, high = FUNCTIONS[name][2]
    places = [2**-120, 2**-12, 1 - 2**-0.5, 2**0.5 - 1, 0.5, 2**-0.5, 0.9966233, 0.9966, BELOW_ONE, 1.0, 2.0, 1e30]
    middle = np.array([sign * place for place in places for sign in (1, -1)], np.float32)
    near = [np.nextafter(middle, np.float32(way)) for way in (-np.inf, np.inf)]
    numbers = np.unique(np.concatenate([middle, *near, np.float32([low, high, 0])]))
    normal = (np.abs(numbers) >= TINY) | (numbers == 0)
    return torch.from_numpy(numbers[normal & (numbers >= low) & (numbers <= high)])


def spread(name: str, count: int, seed: int) -> torch.Tensor:
    """Numbers of every magnitude that the function takes."""
    low, high = FUNCTIONS[name][2]
    generator = np.random.default_rng(seed)
    exponents = generator.uniform(-80, np.log(max(abs(low), high)), count)
    signs = np.where(generator.random(count) < 0.5, -1, 1) if low < 0 < high else np.sign(low + high)
    numbers = np.where(generator.random(count) < 0.5, np.exp(exponents), generator.random(count)) * signs
    return torch.from_numpy(np.clip(numbers, low, high).astype(np.float32))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@EACH
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 17, 1024, 1025]))
def test_values_are_those_of_jax(name: str, seed: int, count: int) -> None:
    function, of_jax, _ = FUNCTIONS[name]
    for x in (spread(name, count, seed), ends(name)):
        expected = torch.from_numpy(np.array(jax.jit(of_jax)(x.numpy())))
        assert same_bits(function(x), expected)


@EACH
def test_every_number_that_can_be_drawn(name: str) -> None:
    function, of_jax, _ = FUNCTIONS[name]
    unit = torch.arange(2**23, dtype=torch.int32).add_(0x3F800000).view(torch.float32) - 1
    x = {"log": unit.clamp(min=TINY), "log1p": -unit, "erf_inv": (2 * unit - 1).clamp(min=-BELOW_ONE)}[name]
    assert same_bits(function(x), torch.from_numpy(np.array(jax.jit(of_jax)(x.numpy()))))


@EACH
@given(st.integers(0, 2**32 - 1))
def test_without_a_compiler_the_values_are_the_same(name: str, seed: int) -> None:
    function = FUNCTIONS[name][0]
    x = torch.cat([spread(name, 3000, seed), ends(name)])
    assert xla_math_cpu.KERNEL is not None
    compiled = function(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla_math_cpu, "KERNEL", None)
        assert same_bits(function(x), compiled)


@EACH
@pytest.mark.parametrize("threads", [2, 5])
def test_the_number_of_threads_does_not_matter(name: str, threads: int) -> None:
    function, x, before = FUNCTIONS[name][0], spread(name, 100_001, 0), torch.get_num_threads()
    torch.set_num_threads(1)
    expected = function(x)
    torch.set_num_threads(threads)
    try:
        assert same_bits(function(x), expected)
    finally:
        torch.set_num_threads(before)


@EACH
def test_numbers_may_lie_anyhow(name: str) -> None:
    function, x = FUNCTIONS[name][0], spread(name, 60, 0).reshape(3, 4, 5)
    for view in (x.transpose(0, 2), x[:, ::2], x[0, 0, 0]):
        found = function(view)
        assert found.is_contiguous()
        assert same_bits(found, function(view.clone(memory_format=torch.contiguous_format)))
    assert same_bits(torch.vmap(function, 1, 1)(x), function(x))


@EACH
def test_it_has_no_derivative_and_takes_float32_alone(name: str) -> None:
    function: Function = FUNCTIONS[name][0]
    with pytest.raises(RuntimeError, match="Expected no derivative through scoped_fn.xla_math"):
        torch.func.grad(lambda x: function(x).sum())(-torch.rand(3))
    with pytest.raises(ValueError, match="Expected float32 numbers, got torch.float64"):
        function(torch.zeros(2, dtype=torch.float64))
