"""Random numbers as pure functions of a key, the same as those of `jax.random`.

A key is a uint32 tensor of shape [2], as `jax.random.key_data` gives it; the generator is threefry2x32 in JAX's
default, partitionable form. On a CPU the numbers equal JAX's bit for bit in float32; in float64, logarithms and the
inverse error function are torch's own and differ in the last digits.

All functions work under `torch.func` and in compiled functions; for many keys use `torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scoped_fn._errors import SpecError
from scoped_fn._random.continuous import cauchy, exponential, gumbel, normal, uniform
from scoped_fn._random.discrete import bernoulli, categorical, geometric, permutation, randint
from scoped_fn._random.words import SIGNED_OF_WIDTH, bits_of, keys_of, shape_of, words_of
from scoped_fn._state_check import check_state
from scoped_fn.kernels import fold_keys
from scoped_fn.state import CompilerState, init_state

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "cauchy",
    "exponential",
    "fold_in",
    "geometric",
    "gumbel",
    "key",
    "next_key",
    "normal",
    "permutation",
    "randint",
    "split",
    "uniform",
]

UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def key(seed: int) -> Tensor:
    """Returns the key of a seed, as `jax.random.key` makes it: uint32 [2].

    Args:
        seed: 0 <= seed < 2**64.

    Example:
        >>> key(7).tolist()
        [0, 7]
    """
    return init_state(key=seed).key


def split(key: Tensor, num: int = 2) -> Tensor:
    """Returns new keys: uint32 [num, 2]. Use each of them, or the old one, once.

    Args:
        key: uint32 [2].
        num: How many.

    Example:
        >>> first, second = split(key(0))
        >>> first.tolist()
        [1797259609, 2579123966]
    """
    if isinstance(num, bool) or not isinstance(num, int) or num < 0:
        raise SpecError(f"Expected a number of keys of 0 or more, got {num!r}. Pass an integer.")
    return _like(keys_of(words_of(key), num), key)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Returns a new key made from a key and a number: uint32 [2].

    Args:
        key: uint32 [2].
        data: 0 <= data < 2**32, or an integer tensor of shape [] with such a value.

    Example:
        >>> torch.equal(fold_in(key(0), 1), split(key(0))[1])
        True
    """
    words = words_of(key)
    if isinstance(data, Tensor):
        if data.shape != () or data.is_floating_point() or data.is_complex() or data.dtype == torch.bool:
            raise SpecError(
                f"Expected a number to fold in as an integer tensor of shape [], got {list(data.shape)} and "
                f"{data.dtype}. Use torch.func.vmap for many."
            )
        number = data.to(torch.int64).to(torch.int32).reshape(1)
    else:
        if isinstance(data, bool) or not isinstance(data, int) or not 0 <= data < 2**32:
            raise SpecError(f"Expected a number 0 <= number < 2**32 to fold in, got {data!r}. Pass such an integer.")
        signed = data - 2**32 if data >= 2**31 else data
        number = torch.full((1,), signed, dtype=torch.int32, device=words.device)
    return _like(fold_keys(words, number)[0], key)


def next_key(state: CompilerState) -> tuple[CompilerState, Tensor]:
    """Returns the state with its next key, and a key to draw from.

    Example:
        >>> state, mine = next_key(init_state(key=0))
        >>> torch.equal(mine, split(key(0))[1])
        True
    """
    check_state(state)
    following, mine = split(state.key)
    return replace(state, key=following), mine


def bits(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.uint32) -> Tensor:
    """Returns random bits.

    Args:
        key: uint32 [2].
        shape: Shape of the result.
        dtype: torch.uint8, uint16, uint32 or uint64.
    """
    if dtype not in UNSIGNED:
        raise SpecError(f"Expected one of {', '.join(map(str, UNSIGNED))} for bits, got {dtype}. Pass one of them.")
    width = torch.iinfo(dtype).bits
    return bits_of(words_of(key), shape_of(shape), width).to(SIGNED_OF_WIDTH[width]).view(dtype)


def _like(words: Tensor, key: Any) -> Tensor:
    return words.view(key.dtype)
