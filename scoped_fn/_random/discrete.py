"""Discrete distributions: truth values, integers, orders and classes from a key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scoped_fn._errors import SpecError
from scoped_fn._random import floats
from scoped_fn._random.continuous import gumbel, uniform
from scoped_fn._random.integers import integers
from scoped_fn._random.words import bits_of, index_of, keys_of, shape_of, words_of
from scoped_fn.kernels import random_keep
from scoped_fn.kernels._xla_math import single


def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: Sequence[int] | None = None) -> Tensor:
    """Returns True with probability `p`.

    Args:
        key: uint32 [2].
        p: A number, for which float32 numbers are drawn, or a floating point tensor.
        shape: Shape of the result; that of `p` if None.

    Returns:
        A bool tensor.
    """
    words = words_of(key)
    _check_chance(p)
    if not isinstance(p, Tensor):
        chance = 0.0 if math.isnan(p) else min(max(single(p), 0.0), 1.0)
        # What `uniform(...) < p` says, without floats.
        return random_keep(words, shape_of(() if shape is None else shape), math.ceil(chance * 2**23))
    return uniform(words, _fitting(p, shape), p.dtype) < p


def randint(key: Tensor, shape: Sequence[int], minval: int, maxval: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns integers from `minval` up to, not including, `maxval`.

    Args:
        key: uint32 [2].
        shape: Shape of the result.
        minval: The least number; clipped to the range of the dtype.
        maxval: The bound; clipped to the range of the dtype, except that one more than its largest number counts. If it
            is not above `minval`, all numbers are `minval`.
        dtype: An integer dtype.
    """
    if not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise SpecError(f"Expected an integer dtype for randint, got {dtype!r}. Draw int64 numbers and convert them.")
    least_number, bound = index_of(minval), index_of(maxval)
    if least_number is None or bound is None:
        raise SpecError(
            f"Expected integers as bounds, got {minval!r} and {maxval!r}. Write randint(key, shape, 0, 10)."
        )
    least, greatest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    low, high = min(max(least_number, least), greatest), min(max(bound, least), greatest + 1)
    return integers(words_of(key), shape_of(shape), low, high, dtype)


def permutation(key: Tensor, x: int | Tensor, dim: int = 0) -> Tensor:
    """Returns the numbers from 0 to `x - 1`, or the slices of a tensor, in random order.

    Args:
        key: uint32 [2].
        x: How many, or a tensor.
        dim: The dimension of the tensor along which its slices are put in order.

    Returns:
        int64 [x], or a tensor like `x`.
    """
    words, count = words_of(key), _count(x, dim)
    order = torch.arange(count, device=words.device)
    for _ in range(math.ceil(3 * math.log(max(1, count)) / math.log(2**32 - 1))):
        words, part = keys_of(words, 2).unbind()
        unsigned_order = bits_of(part, (count,), 32) ^ -(2**31)
        order = order[torch.sort(unsigned_order, stable=True).indices]
    return x.index_select(dim, order.to(x.device)) if isinstance(x, Tensor) else order


def geometric(
    key: Tensor, p: float | Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Returns how many trials it takes until the first success, from 1.

    Args:
        key: uint32 [2].
        p: The probability of a success: a number, or a floating point tensor.
        shape: Shape of the result; that of `p` if None.
        dtype: An integer or floating point dtype of the result.
    """
    words = words_of(key)
    _check_chance(p)
    chance = p if isinstance(p, Tensor) else torch.full((), p, dtype=torch.get_default_dtype(), device=words.device)
    drawn = uniform(words, _fitting(chance, shape), chance.dtype)
    drawn = torch.where(drawn == 0, 1.0, drawn)
    rate = floats.log1p(-chance.detach())
    # XLA divides by few numbers by multiplying with their reciprocals.
    few = rate.numel() < drawn.numel()
    trials = (floats.log(drawn) * rate.reciprocal() if few else floats.log(drawn) / rate).floor() + 1
    return trials.to(dtype) if dtype.is_floating_point else _saturated(trials, dtype)


def categorical(
    key: Tensor, logits: Tensor, dim: int = -1, shape: Sequence[int] | None = None, replace: bool = True
) -> Tensor:
    """Returns indices of classes, drawn with the probabilities `softmax(logits, dim)`.

    Args:
        key: uint32 [2].
        logits: Floating point; `dim` counts the classes, the other dimensions are the batch.
        dim: The dimension of the classes.
        shape: Shape of the result, which ends with that of the batch; that of the batch if None.
        replace: Whether a class may be drawn more than once.

    Returns:
        int64, of that shape.
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() == 0:
        got = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise SpecError(
            f"Expected logits as a floating point tensor with a dimension of classes, got {got}. Convert it."
        )
    if _count(logits, dim) == 0:
        raise SpecError(f"Expected one class or more, got none in {list(logits.shape)}. Pass another dim.")
    batch = list(logits.shape)
    del batch[dim]
    shape = batch if shape is None else list(shape_of(shape))
    count = len(shape) - len(batch)
    if count < 0 or shape[count:] != batch:
        raise SpecError(f"Expected a shape that ends with {batch}, the batch, got {shape}. Put more dimensions before.")
    dim = dim % logits.dim() - logits.dim()
    if replace:
        full = [*shape[:count], *logits.shape]
        return (gumbel(key, full, logits.dtype) + logits).argmax(dim)
    draws, classes = math.prod(shape[:count]), logits.shape[dim]
    if draws > classes:
        raise SpecError(
            f"Expected at most {classes} draws without replacement from {classes} classes, got {draws}. Draw fewer."
        )
    scores = (logits + gumbel(key, logits.shape, logits.dtype)).movedim(dim, -1)
    return scores.topk(draws).indices.movedim(-1, 0).reshape(shape)


def _saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns floating point numbers of 1 or more as integers, the largest one where they are larger."""
    if dtype == torch.uint64:  # in which torch computes little
        small = values < 2.0**63
        upper = _saturated(torch.where(small, 0.0, values - 2.0**63), torch.int64)
        return torch.where(small, _saturated(values, torch.int64), upper ^ -(2**63)).view(torch.uint64)
    largest = torch.iinfo(dtype).max
    fits = values < float(largest)
    return torch.where(fits, values, 1.0).to(dtype).masked_fill(~fits, largest)


def _check_chance(p: Any) -> None:
    if not hasattr(p, "__float__"):  # as tensors and NumPy's numbers have
        raise SpecError(
            f"Expected a probability as a number or a tensor, got a {type(p).__name__}. Pass p, then the shape."
        )


def _fitting(p: Tensor, shape: Sequence[int] | None) -> Sequence[int]:
    if shape is None:
        return p.shape
    shape = shape_of(shape)
    if len(shape) < p.dim() or any(a not in (1, b) for a, b in zip(p.shape[::-1], tuple(shape)[::-1], strict=False)):
        raise SpecError(f"Expected probabilities that broadcast to {list(shape)}, got {list(p.shape)}. Reshape them.")
    return shape


def _count(x: int | Tensor, dim: int) -> int:
    if isinstance(x, Tensor):
        if x.dim() == 0:
            raise SpecError("Expected a tensor with slices to put in order, got one of shape []. Pass its .item().")
        if not -x.dim() <= dim < x.dim():
            raise SpecError(f"Expected a dimension of a tensor of {x.dim()}, got {dim}. Pass one that it has.")
        return x.shape[dim]
    if isinstance(x, bool) or not isinstance(x, int) or x < 0:
        raise SpecError(f"Expected how many numbers to put in order, 0 or more, or a tensor, got {x!r}. Pass one.")
    return x
