"""Random bits from a key: threefry2x32, the counter-based generator of `jax.random` (Salmon et al., SC 2011).

The words of keys and the bits are int32 here, for their bit patterns: torch computes little in uint32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from scoped_fn.kernels._opaque_op import define_op
from scoped_fn.kernels._ops import LIBRARY

ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY: Final = 0x1BD11BDA
CHUNK: Final = 1 << 14  # int32 numbers that stay in the caches of one core while some hundred operations run over them
LIMIT: Final = 2**31

Words = tuple[Tensor, Tensor]


def threefry2x32(key: Words, counter: Words) -> Words:
    """Returns two words for each counter: 20 rounds, with a word of the key added after every four.

    Args:
        key: int32, high and low word.
        counter: int32, high and low word; broadcast with the key.
    """
    keys = (*key, key[0] ^ key[1] ^ PARITY)
    high, low = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(5):
        for rotation in ROTATIONS[i % 2]:
            high = high + low
            low = _rotated(low, rotation) ^ high
        high, low = high + keys[(i + 1) % 3], low + keys[(i + 2) % 3] + (i + 1)
    return high, low


def _rotated(word: Tensor, by: int) -> Tensor:
    return (word << by) | ((word >> (32 - by)) & ((1 << by) - 1))


def _random_bits(keys: Tensor, shape: Sequence[int]) -> Tensor:
    count = math.prod(shape)
    counter = torch.arange(count, dtype=torch.int32, device=keys.device)[None]
    high, low = threefry2x32((keys[:, :1], keys[:, 1:]), (torch.zeros_like(counter), counter))
    return (high ^ low).view(len(keys), *shape)


def _fold_keys(keys: Tensor, data: Tensor) -> Tensor:
    words = threefry2x32((keys[:, :1], keys[:, 1:]), (torch.zeros_like(data), data))
    return torch.stack(words, -1)


def _random_bits_on_cpu(keys: Tensor, shape: Sequence[int]) -> Tensor:
    count = math.prod(shape)
    bits = keys.new_empty(len(keys), count)
    for key, row in zip(keys, bits, strict=True):
        for start in range(0, count, CHUNK):
            part = row[start : start + CHUNK]
            torch.arange(start, start + len(part), dtype=torch.int32, out=part)
            high, low = _in_place(key, part)
            part.copy_(high.bitwise_xor_(low))
    return bits.view(len(keys), *shape)


def _fold_keys_on_cpu(keys: Tensor, data: Tensor) -> Tensor:
    made = [torch.stack(_in_place(key, row), -1) for key, row in zip(keys, data, strict=True)]
    return torch.stack(made) if made else data.new_empty(*data.shape, 2)


def _in_place(key: Tensor, counter: Tensor) -> Words:
    """Returns what `threefry2x32` does for one key (2,) and low words of counters (n,), in a third of the time.

    NumPy's arrays because its operations on few numbers start faster than torch's, and are unsigned.
    """
    first, second = key.numpy().view("uint32")[:, None]
    keys = (first, second, first ^ second ^ PARITY)
    low = counter.numpy().view("uint32") + second
    high = low * 0 + first
    for i in range(5):
        for rotation in ROTATIONS[i % 2]:
            high += low
            carried = low >> (32 - rotation)
            low <<= rotation
            low |= carried
            low ^= high
        high += keys[(i + 1) % 3]
        low += keys[(i + 2) % 3] + (i + 1)
    return torch.from_numpy(high.view("int32")), torch.from_numpy(low.view("int32"))


_bits_op = define_op(
    LIBRARY,
    "random_bits(Tensor keys, int[] shape) -> Tensor",
    cpu=_random_bits_on_cpu,
    cuda=_random_bits,
    fake=lambda keys, shape: keys.new_empty(len(keys), *shape),
    derivative=None,
)
_fold_op = define_op(
    LIBRARY,
    "fold_keys(Tensor keys, Tensor data) -> Tensor",
    cpu=_fold_keys_on_cpu,
    cuda=_fold_keys,
    fake=lambda keys, data: data.new_empty(*data.shape, 2),
    derivative=None,
)

_words_op = define_op(
    LIBRARY,
    "key_words(Tensor keys) -> Tensor",
    cpu=lambda keys: keys.view(torch.int32).clone(),
    cuda=lambda keys: keys.view(torch.int32).clone(),
    fake=lambda keys: keys.new_empty(keys.shape, dtype=torch.int32),
    derivative=None,
)

# Operator -> the same as operations that a compiler fuses with what uses the bits.
RANDOM: Final[Mapping[Any, Callable[..., Any]]] = MappingProxyType({_bits_op: _random_bits, _fold_op: _fold_keys})


def key_words(key: Tensor) -> Tensor:
    """Returns the words of a key, uint32 (2,), as int32 (2,).

    One operator, for compilers: loops that read uint32 are not vectorized.
    """
    return _words_op(key[None])[0]  # type: ignore[no-any-return]


def random_bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns 32 random bits for each element, as `jax.random.bits` draws them.

    Args:
        key: int32 (2,), the words of a key.
        shape: Shape of the result; fewer than 2**31 elements.

    Returns:
        int32, of that shape.
    """
    if math.prod(shape) >= LIMIT:
        raise ValueError(f"Expected to draw fewer than 2**31 numbers at once, got shape {list(shape)}. Split the key.")
    return _bits_op(key[None], list(shape))[0]  # type: ignore[no-any-return]


def fold_keys(key: Tensor, data: Tensor) -> Tensor:
    """Returns a key for each number, as `jax.random.fold_in` makes it.

    Args:
        key: int32 (2,), the words of a key.
        data: int32 (n,).

    Returns:
        int32 (n, 2).
    """
    return _fold_op(key[None], data[None])[0]  # type: ignore[no-any-return]
