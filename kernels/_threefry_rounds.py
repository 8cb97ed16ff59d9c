"""threefry2x32 in NumPy (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY: Final = 0x1BD11BDA

Words = tuple[Tensor, Tensor]


def threefry_numpy(key: Tensor, counter: Tensor) -> Words:
    """Returns two words for each counter: 20 rounds, with words of the key added after every four.

    Args:
        key: int32 (2,), on a CPU.
        counter: int32 (n,), the low words of counters whose high words are 0.
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
