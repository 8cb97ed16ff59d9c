"""Random numbers as pure functions of a key, the same as those of `jax.random`.

A key is a uint32 tensor of shape [2], as `jax.random.key_data` gives it; the generator is threefry2x32 in JAX's
default, partitionable form. On a CPU the numbers equal JAX's bit for bit in float32; in float64, logarithms and the
inverse error function are torch's own and differ in the last digits.

All functions work under `torch.func` and in compiled functions; for many keys use `torch.func.vmap`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from scoped_fn._errors import SpecError
from scoped_fn._random import floats
from scoped_fn._random.integers import integers
from scoped_fn._random.words import bits_of, keys_of, words_of
from scoped_fn.kernels import fold_keys, random_keep
from scoped_fn.kernels._xla_math import fused, single
from scoped_fn.state import CompilerState, init_state

UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
ONE = MappingProxyType(  # the bits of 1.0
    {torch.float16: 0x3C00, torch.bfloat16: 0x3F80, torch.float32: 0x3F800000, torch.float64: 0x3FF << 52}
)
SIGNED_OF_WIDTH = MappingProxyType({8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64})


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
    return bits_of(words_of(key), shape, width).to(SIGNED_OF_WIDTH[width]).view(dtype)


def uniform(
    key: Tensor,
    shape: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    minval: float = 0.0,
    maxval: float = 1.0,
) -> Tensor:
    """Returns numbers that are equally likely anywhere from `minval` up to, not including, `maxval`.

    Args:
        key: uint32 [2].
        shape: Shape of the result.
        dtype: torch.float32, float64, float16 or bfloat16; torch's default dtype if None.
        minval: The least number.
        maxval: The bound.
    """
    dtype = _float(dtype)
    info = torch.finfo(dtype)
    width, mantissa = info.bits, round(-math.log2(info.eps))
    drawn = width if mantissa >= 8 else 8
    container = SIGNED_OF_WIDTH[width]
    fraction = (bits_of(words_of(key), shape, drawn) >> (drawn - mantissa)) & ((1 << mantissa) - 1)
    unit = (fraction | ONE[dtype]).to(container).view(dtype) - 1
    return unit if minval == 0.0 and maxval == 1.0 else _ranged(unit, minval, maxval)


def _ranged(unit: Tensor, minval: float, maxval: float) -> Tensor:
    low, high = (torch.full((), value, dtype=unit.dtype, device=unit.device) for value in (minval, maxval))
    span = high - low
    made = fused(unit, span, low) if unit.dtype == torch.float32 else unit * span + low
    return torch.maximum(made, low)


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Returns numbers of the normal distribution with mean 0 and standard deviation 1.

    Args:
        key: uint32 [2].
        shape: Shape of the result.
        dtype: A floating point or complex dtype; torch's default dtype if None.
    """
    if dtype is not None and dtype.is_complex:
        real, imag = (normal(part, shape, dtype.to_real()) for part in keys_of(words_of(key), 2))
        return torch.complex(real, imag) / 2**0.5
    dtype = _float(dtype)
    least = -1.0 + torch.finfo(dtype).eps / 2
    drawn = uniform(key, shape, dtype, least, 1.0)
    narrow = dtype in (torch.float16, torch.bfloat16)
    found = floats.erf_inv(drawn.float()).to(dtype) if narrow else floats.erf_inv(drawn)
    return found * torch.full((), 2**0.5, dtype=dtype, device=found.device)


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
    if not isinstance(p, Tensor):
        chance = 0.0 if math.isnan(p) else min(max(single(p), 0.0), 1.0)
        # What `uniform(...) < p` says, without floats.
        return random_keep(words, shape or (), math.ceil(chance * 2**23))
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
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise SpecError(f"Expected an integer dtype for randint, got {dtype}. Draw int64 numbers and convert them.")
    least, greatest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    low, high = min(max(minval, least), greatest), min(max(maxval, least), greatest + 1)
    return integers(words_of(key), shape, low, high, dtype)


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


def exponential(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Returns numbers of the exponential distribution with mean 1. Arguments are those of `normal`."""
    return -floats.log1p(-uniform(key, shape, dtype))


def gumbel(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Returns numbers of the standard Gumbel distribution. Arguments are those of `normal`."""
    dtype = _float(dtype)
    return -floats.log(-floats.log(uniform(key, shape, dtype, torch.finfo(dtype).tiny, 1.0)))


def cauchy(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Returns numbers of the standard Cauchy distribution. Arguments are those of `normal`."""
    dtype = _float(dtype)
    drawn = uniform(key, shape, dtype, torch.finfo(dtype).eps, 1.0)
    return ((drawn - 0.5) * torch.full((), math.pi, dtype=dtype, device=drawn.device)).tan()


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
    chance = p if isinstance(p, Tensor) else torch.full((), p, dtype=torch.get_default_dtype(), device=words.device)
    drawn = uniform(words, _fitting(chance, shape), chance.dtype)
    drawn = torch.where(drawn == 0, 1.0, drawn)
    return ((floats.log(drawn) / floats.log1p(-chance.detach())).floor() + 1).to(dtype)


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
    _count(logits, dim)
    batch = list(logits.shape)
    del batch[dim]
    shape = batch if shape is None else list(shape)
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


def _fitting(p: Tensor, shape: Sequence[int] | None) -> Sequence[int]:
    if shape is None:
        return p.shape
    if len(shape) < p.dim() or any(a not in (1, b) for a, b in zip(p.shape[::-1], tuple(shape)[::-1], strict=False)):
        raise SpecError(f"Expected probabilities that broadcast to {list(shape)}, got {list(p.shape)}. Reshape them.")
    return shape


def _count(x: int | Tensor, dim: int) -> int:
    if isinstance(x, Tensor):
        if not -x.dim() <= dim < x.dim():
            raise SpecError(f"Expected a dimension of a tensor of {x.dim()}, got {dim}. Pass one that it has.")
        return x.shape[dim]
    if isinstance(x, bool) or not isinstance(x, int) or x < 0:
        raise SpecError(f"Expected how many numbers to put in order, 0 or more, or a tensor, got {x!r}. Pass one.")
    return x


def _float(dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise SpecError(f"Expected float16, bfloat16, float32 or float64, got {dtype}. Draw one of these and convert.")
    return dtype


def _like(words: Tensor, key: Any) -> Tensor:
    return words.view(key.dtype)
