"""Keys as int32 words, and random bits of any width."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from scoped_fn._errors import SpecError
from scoped_fn.kernels import fold_keys, random_bits

SIGNED_OF_WIDTH = MappingProxyType({8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64})


def words_of(key: Any) -> Tensor:
    """Returns the words of a key: int32 (2,).

    Args:
        key: uint32 (2,), or what this function returned.

    Raises:
        SpecError: It is something else.
    """
    if isinstance(key, Tensor) and key.shape == (2,) and key.dtype in (torch.uint32, torch.int32):
        return key.view(torch.int32) if key.dtype == torch.uint32 else key
    got = f"{list(key.shape)} and {key.dtype}" if isinstance(key, Tensor) else f"a {type(key).__name__}"
    raise SpecError(
        f"Expected a key of shape [2] and dtype uint32, got {got}. Make one with sf.random.key(seed); for many keys "
        "use torch.func.vmap."
    )


def shape_of(shape: Any) -> tuple[int, ...]:
    """Returns a shape; of one dimension for an integer, as in JAX.

    Raises:
        SpecError: It is something else, or a size is negative.
    """
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    whole = [index_of(size) for size in sizes]
    if any(size is None or isinstance(size, bool) or size < 0 for size in whole):
        raise SpecError(f"Expected a shape of integers of 0 or more, got {shape!r}. Pass a tuple such as (2, 3).")
    return tuple(whole)  # type: ignore[arg-type]


def index_of(value: Any) -> int | None:
    """Returns an integer, also one of NumPy; None for what is none."""
    if isinstance(value, (int, torch.SymInt)):
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several
        return None


def keys_of(words: Tensor, count: int) -> Tensor:
    """Returns `count` keys made from one: int32 (count, 2).

    Raises:
        ValueError: There are too many.
    """
    if count >= 2**31:
        raise ValueError(f"Expected fewer than 2**31 keys or numbers of 64 bits, got {count}. Split the key first.")
    return fold_keys(words, torch.arange(count, dtype=torch.int32, device=words.device))


def bits_of(words: Tensor, shape: Sequence[int], width: int) -> Tensor:
    """Returns random bits.

    Args:
        words: int32 (2,).
        shape: Shape of the result.
        width: 8, 16 or 32: int32 of which only so many bits may be set, or all; 64: int64.
    """
    if width == 64:
        high, low = keys_of(words, math.prod(shape)).to(torch.int64).reshape(*shape, 2).unbind(-1)
        return (high << 32) | (low & 0xFFFFFFFF)
    bits = random_bits(words, shape)
    return bits if width == 32 else bits & ((1 << width) - 1)
