"""JAX as the oracle: its random functions called with a key's words, and comparisons to the bit and to the ulp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDE = {torch.float64, torch.int64, torch.uint64, torch.complex128}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BITS = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def jax_dtype(dtype: torch.dtype) -> Any:
    """JAX's name for a dtype."""
    return jnp.dtype(str(dtype).removeprefix("torch."))


def to_torch(array: Any) -> torch.Tensor:
    """A copy of a JAX array, bit for bit."""
    values = np.array(array)
    if values.dtype == jnp.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def to_jax(value: Any) -> Any:
    """A tensor as an array of the same bits; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(jnp.bfloat16)
    return plain.numpy()


def jax_key(key: Any) -> Any:
    """The JAX key of two words."""
    words = key.detach().numpy() if isinstance(key, torch.Tensor) else np.asarray(key, dtype=np.uint32)
    return jax.random.wrap_key_data(words)


def drawn(
    name: str,
    key: Any,
    *args: Any,
    dtype: torch.dtype | None = None,
    wide: bool | None = None,
    one_by_one: bool = False,
    **kw: Any,
) -> torch.Tensor:
    """What `jax.random.<name>` gives, as a tensor; with x64 on where the dtype asks for it, or `wide` says so.

    Jitted, JAX on a CPU contracts the multiplication and addition of `uniform` with bounds to one rounding, in float32
    and float64. `one_by_one` runs operation by operation, as the formula is written: ours in float64.
    """
    with jax.enable_x64(dtype in WIDE if wide is None else wide), jax.disable_jit(one_by_one):
        if dtype is not None:
            kw["dtype"] = jax_dtype(dtype)
        return to_torch(getattr(jax.random, name)(jax_key(key), *map(to_jax, args), **kw))


def keys_of(key: Any, num: int) -> torch.Tensor:
    """The words [num, 2] of `jax.random.split`."""
    return to_torch(jax.random.key_data(jax.random.split(jax_key(key), num)))


def folded(key: Any, data: int) -> torch.Tensor:
    """The words of `jax.random.fold_in`."""
    return to_torch(jax.random.key_data(jax.random.fold_in(jax_key(key), np.uint32(data))))


def key_words(seed: int) -> torch.Tensor:
    """The words of a seed's key, whose high word counts."""
    with jax.enable_x64(True):
        return to_torch(jax.random.key_data(jax.random.key(np.uint64(seed))))


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element as a signed integer."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if real.dtype == torch.bool:
        return real.to(torch.int8)
    return real.detach().contiguous().view(SIGNED[real.element_size()])


def assert_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same dtype, shape and bits."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    one, other = as_integers(actual), as_integers(expected)
    wrong = (one != other).nonzero()
    assert not len(wrong), (
        f"{len(wrong)} of {one.numel()} differ, first at {wrong[0].tolist()}: "
        f"{actual.reshape(-1)[:4].tolist()} is not {expected.reshape(-1)[:4].tolist()}"
    )


def assert_ulps(actual: torch.Tensor, expected: torch.Tensor, most: int = 1) -> None:
    """The same dtype and shape, and no element further away than some units in the last place."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(actual.isnan(), expected.isnan())
    distance = (_in_order(actual) - _in_order(expected)).abs()
    assert not distance.numel() or distance.max() <= most, f"{distance.max()} ulps"


def assert_near(actual: torch.Tensor, expected: torch.Tensor, epsilons: float) -> None:
    """The same dtype and shape, and values as near as some roundings of numbers of that size, or of one, may be."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    allowed = epsilons * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=allowed, atol=allowed, equal_nan=True)


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Integers that follow one another as the floats do; both zeros are 0."""
    words = as_integers(tensor)
    lowest = torch.iinfo(words.dtype).min
    return torch.where(words < 0, lowest - words.to(torch.int64), words.to(torch.int64))
