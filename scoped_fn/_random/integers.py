"""Random integers of a range, as `jax.random.randint` draws them: two draws of bits, modulo the span."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scoped_fn._random.words import bits_of, keys_of


def integers(words: Tensor, shape: Sequence[int], low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Returns integers from `low` up to, not including, `high`.

    Args:
        words: int32 (2,), a key.
        shape: Shape of the result.
        low: In the range of the dtype.
        high: In the range of the dtype, or one more; with `high <= low` the result is `low`.
        dtype: An integer dtype of the result.
    """
    if torch.iinfo(dtype).bits < 32:  # else the least numbers would be likelier than others
        return integers(words, shape, low, high, torch.int32).to(dtype)
    width = torch.iinfo(dtype).bits
    span = max(high - low, 1) % 2**width  # 0 stands for the whole range
    upper, lower = (bits_of(key, shape, width) for key in keys_of(words, 2).unbind())
    if width == 64:
        return (_modulo_64(upper, lower, span) + low).to(dtype)
    mask = 2**width - 1
    upper, lower = upper.to(torch.int64) & mask, lower.to(torch.int64) & mask
    if span == 0:
        return _wrapped(lower + low, width, dtype)
    factor = _factor(width, span)
    return _wrapped((((upper % span) * factor & mask) + lower % span & mask) % span + low, width, dtype)


def _factor(width: int, span: int) -> int:
    """Returns 2**width modulo the span, as far as products of that width tell."""
    half = (1 << width // 2) % span
    return half * half % (1 << width) % span


def _wrapped(values: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Returns int64 values modulo 2**width in an integer dtype of that width."""
    values = values & (2**width - 1)
    if dtype.is_signed:
        values = torch.where(values >= 2 ** (width - 1), values - 2**width, values)
    return values.to(dtype)


def _modulo_64(upper: Tensor, lower: Tensor, span: int) -> Tensor:
    """Returns (upper * 2**64 + lower) modulo the span, as far as 64 bits go; all of them bit patterns in int64."""
    if span == 0:
        return lower
    product = _remainder(upper, span) * _signed(_factor(64, span))
    return _remainder(product + _remainder(lower, span), span)


def _remainder(value: Tensor, span: int) -> Tensor:
    """Returns the remainder of unsigned 64-bit numbers."""
    if span >= 2**63:  # at most once in any number
        return torch.where(_at_least(value, span), value - _signed(span), value)
    half = torch.div((value >> 1) & (2**63 - 1), span, rounding_mode="floor")
    rest = value - 2 * half * span
    return torch.where(_at_least(rest, span), rest - span, rest)


def _at_least(value: Tensor, bound: int) -> Tensor:
    """Compares unsigned 64-bit numbers."""
    return (value ^ -(2**63)) >= bound - 2**63


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
