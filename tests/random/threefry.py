"""Threefry-2x32 in NumPy, written from the paper and the documentation of JAX's keys: a second oracle beside JAX.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011. Twenty rounds; the counter of an
element is its place in the flat array, high word first.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
MASK = 0xFFFFFFFF
Words = np.ndarray[Any, np.dtype[np.uint32]]


def block(key: Words, high: Words, low: Words) -> tuple[Words, Words]:
    """The two words that a key makes of each pair of counter words."""
    first, second = (int(word) for word in key)
    schedule = [first, second, first ^ second ^ PARITY]
    left = (high.astype(np.uint64) + schedule[0]) & MASK
    right = (low.astype(np.uint64) + schedule[1]) & MASK
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            left = (left + right) & MASK
            right = ((right << distance) | (right >> (32 - distance))) & MASK ^ left
        left = (left + schedule[(group + 1) % 3]) & MASK
        right = (right + schedule[(group + 2) % 3] + group + 1) & MASK
    return left.astype(np.uint32), right.astype(np.uint32)


def counted(key: Words, shape: tuple[int, ...]) -> tuple[Words, Words]:
    """The two words of each element of an array."""
    places = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    return block(key, (places >> 32).astype(np.uint32), (places & MASK).astype(np.uint32))


def seeded(seed: int) -> Words:
    """The key of a seed."""
    return np.array([seed >> 32, seed & MASK], dtype=np.uint32)


def split(key: Words, num: int) -> Words:
    """Keys [num, 2] from one."""
    return np.stack(counted(key, (num,)), axis=-1)


def fold_in(key: Words, data: int) -> Words:
    """The key that goes with a number."""
    left, right = block(key, *(np.array([word], dtype=np.uint32) for word in (0, data)))
    return np.concatenate([left, right])


def bits(key: Words, shape: tuple[int, ...], width: int) -> np.ndarray[Any, Any]:
    """Random bits: the words side by side for 64, else their exclusive or, cut to the width."""
    left, right = counted(key, shape)
    if width == 64:
        return left.astype(np.uint64) << np.uint64(32) | right.astype(np.uint64)
    return (left ^ right).astype(f"uint{width}")


def uniform(key: Words, shape: tuple[int, ...], width: int) -> np.ndarray[Any, Any]:
    """Floats in [0, 1) of 16, 32 or 64 bits: the top bits as the mantissa of a number in [1, 2), less one."""
    dtype = np.dtype(f"float{width}")
    mantissa = np.finfo(dtype).nmant
    one = np.array(1.0, dtype).view(f"uint{width}")
    floats = bits(key, shape, width) >> np.uint64(width - mantissa).astype(f"uint{width}") | one
    return floats.view(dtype) - np.array(1.0, dtype)
