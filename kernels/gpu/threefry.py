"""threefry2x32 on a GPU: one program for a block of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _rounds(high, low, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr):
    high += low
    low = ((low << R0) | (low >> (32 - R0))) ^ high
    high += low
    low = ((low << R1) | (low >> (32 - R1))) ^ high
    high += low
    low = ((low << R2) | (low >> (32 - R2))) ^ high
    high += low
    low = ((low << R3) | (low >> (32 - R3))) ^ high
    return high, low


@triton.jit
def _threefry(key, counter):
    k0 = tl.load(key).to(tl.uint32, bitcast=True)
    k1 = tl.load(key + 1).to(tl.uint32, bitcast=True)
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    low = counter + k1
    high = low - low + k0
    high, low = _rounds(high, low, 13, 15, 26, 6)
    high, low = high + k1, low + k2 + 1
    high, low = _rounds(high, low, 17, 29, 16, 24)
    high, low = high + k2, low + k0 + 2
    high, low = _rounds(high, low, 13, 15, 26, 6)
    high, low = high + k0, low + k1 + 3
    high, low = _rounds(high, low, 17, 29, 16, 24)
    high, low = high + k1, low + k2 + 4
    high, low = _rounds(high, low, 13, 15, 26, 6)
    return high + k2, low + k0 + 5


@triton.jit
def _bits_kernel(keys, out, count, bound, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(count, BLOCK)  # rows are no axis of their own: there may be more than the 65535 that one holds
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    high, low = _threefry(keys + 2 * row, at.to(tl.uint32))
    bits = high ^ low
    value = ((bits >> 9).to(tl.int32) < bound).to(tl.int8) if KEEP else bits.to(tl.int32, bitcast=True)
    tl.store(out + row * count + at, value, mask=at < count)


@triton.jit
def _fold_kernel(keys, data, out, count, BLOCK: tl.constexpr):
    blocks = tl.cdiv(count, BLOCK)  # rows are no axis of their own: there may be more than the 65535 that one holds
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    counter = tl.load(data + row * count + at, mask=at < count, other=0).to(tl.uint32, bitcast=True)
    high, low = _threefry(keys + 2 * row, counter)
    place = out + 2 * (row * count + at)
    tl.store(place, high.to(tl.int32, bitcast=True), mask=at < count)
    tl.store(place + 1, low.to(tl.int32, bitcast=True), mask=at < count)


def random_bits(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """Launches the draw of int32 (B, *shape)."""
    return _drawn(keys, _empty(keys, *shape, dtype=torch.int32), shape, 0, keep=False)


def random_keep(keys: Tensor, shape: Sequence[int], bound: int) -> Tensor:
    """Launches the draw of bool (B, *shape)."""
    return _drawn(keys, _empty(keys, *shape, dtype=torch.bool), shape, bound, keep=True)


def _drawn(keys: Tensor, out: Tensor, shape: Sequence[int], bound: int, *, keep: bool) -> Tensor:
    count = math.prod(shape)
    if out.numel():
        _bits_kernel[(triton.cdiv(count, BLOCK) * len(keys),)](
            keys.contiguous(), out, count, bound, KEEP=keep, BLOCK=BLOCK, num_warps=4, num_stages=1
        )
    return out


def fold_keys(keys: Tensor, data: Tensor) -> Tensor:
    """Launches the making of keys, int32 (B, n, 2)."""
    out = _empty(data, *data.shape[1:], 2, dtype=torch.int32)
    if out.numel():
        grid = (triton.cdiv(data.shape[1], BLOCK) * len(keys),)
        _fold_kernel[grid](
            keys.contiguous(), data.contiguous(), out, data.shape[1], BLOCK=BLOCK, num_warps=4, num_stages=1
        )
    return out


def _empty(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty((len(like), *shape), dtype=dtype, device=like.device)
