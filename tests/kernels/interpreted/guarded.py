"""Calls a launcher with outputs that have fences around them, and compares what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

FENCE = 256
MARK = 0xA5
Launcher = Callable[..., Any]


class Fences:
    """Allocates tensors inside larger buffers."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.full((FENCE + size + FENCE,), MARK, dtype=torch.uint8, device=device)
        self.buffers.append(buffer)
        return buffer[FENCE : FENCE + size].view(dtype).view(shape)

    def zeros(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.empty(shape, dtype=dtype, device=device).zero_()

    def empty_like(self, x: Tensor) -> Tensor:
        return self.empty(tuple(x.shape), dtype=x.dtype, device=x.device)

    def check(self) -> None:
        for buffer in self.buffers:
            assert (buffer[:FENCE] == MARK).all(), "a kernel wrote before the beginning of an output"
            assert (buffer[-FENCE:] == MARK).all(), "a kernel wrote past the end of an output"


def guarded(launcher: Launcher, *arguments: Any, **options: Any) -> Any:
    """The outputs of a launcher, which wrote nothing outside of them and nothing into its arguments."""
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    fences = Fences()
    with patch.multiple(torch, empty=fences.empty, zeros=fences.zeros, empty_like=fences.empty_like):
        outputs = launcher(*arguments, **options)
    fences.check()
    assert all(same_bits(now, then) for now, then in zip(tensors, before, strict=True)), "an argument has changed"
    return outputs


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def bits(x: Tensor) -> Tensor:
    # Not `contiguous`, which leaves a single element the stride it has, and `view` refuses that.
    return x.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same(got: Tensor, wanted: Tensor) -> None:
    """Equal bit for bit, except that a NaN is like any other."""
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    assert got.is_contiguous()
    nan = got.float().isnan()
    assert torch.equal(nan, wanted.float().isnan())
    # Equal values, and equal signs of zeros.
    a, b = got.float().masked_fill(nan, 0.0), wanted.float().masked_fill(nan, 0.0)
    wrong = (a != b) | (a.signbit() != b.signbit())
    assert not wrong.any(), f"at {wrong.nonzero()[0].tolist()}: {a[wrong][0]}, expected {b[wrong][0]}"


def assert_all_same(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert_same(one, other)


def assert_one_step(got: Tensor, wanted: Tensor) -> None:
    """FP8 numbers that are equal or neighbors, where float32 results of other roundings were cast."""
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    nan = got.float().isnan()
    assert torch.equal(nan, wanted.float().isnan())
    apart = (ordinal(got) - ordinal(wanted)).abs().masked_fill(nan, 0)
    assert apart.numel() == 0 or apart.max() <= 1


def ordinal(x: Tensor) -> Tensor:
    """The place of each FP8 number among all of them."""
    bits = x.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)
