"""Random bits from a key: threefry2x32, the counter-based generator of `jax.random`, as operators.

The words of keys and the bits are int32 here, for their bit patterns: torch computes little in uint32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from scoped_fn.kernels._opaque_op import define_op
from scoped_fn.kernels._ops import LIBRARY

LIMIT: Final = 2**31


def _define(schema: str, fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]

    def of(module: str) -> Callable[..., Any]:  # imported at the first draw: it compiles, or imports Triton
        return lambda *arguments: getattr(import_module(f"scoped_fn.kernels.{module}"), name)(*arguments)

    def on_gpu(*arguments: Any) -> Any:
        with torch.cuda.device(arguments[0].device):
            return of("gpu.threefry")(*arguments)

    return define_op(LIBRARY, schema, cpu=of("threefry_cpu"), cuda=on_gpu, fake=fake, derivative=None)


_bits = _define(
    "random_bits(Tensor keys, int[] shape) -> Tensor", lambda keys, shape: keys.new_empty(len(keys), *shape)
)
_keep = _define(
    "random_keep(Tensor keys, int[] shape, int bound) -> Tensor",
    lambda keys, shape, bound: keys.new_empty(len(keys), *shape, dtype=torch.bool),
)
_fold = _define("fold_keys(Tensor keys, Tensor data) -> Tensor", lambda keys, data: data.new_empty(*data.shape, 2))


def random_bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns 32 random bits for each element, as `jax.random.bits` draws them.

    Args:
        key: int32 (2,), the words of a key.
        shape: Shape of the result; fewer than 2**31 elements.

    Returns:
        int32, of that shape.
    """
    return _bits(_words(key), _checked(shape))[0]  # type: ignore[no-any-return]


def random_keep(key: Tensor, shape: Sequence[int], bound: int) -> Tensor:
    """Returns True where the upper 23 of 32 random bits are below a bound: with probability `bound / 2**23`.

    Args:
        key: int32 (2,), the words of a key.
        shape: Shape of the result; fewer than 2**31 elements.
        bound: From 0 to 2**23.

    Returns:
        bool, of that shape.
    """
    return _keep(_words(key), _checked(shape), bound)[0]  # type: ignore[no-any-return]


def fold_keys(key: Tensor, data: Tensor) -> Tensor:
    """Returns a key for each number, as `jax.random.fold_in` makes it.

    Args:
        key: int32 (2,), the words of a key.
        data: int32 (n,).

    Returns:
        int32 (n, 2).
    """
    if data.dtype != torch.int32 or data.dim() != 1:
        raise ValueError(f"Expected int32 numbers (n,), got {data.dtype} {list(data.shape)}. Convert them.")
    return _fold(_words(key), data[None])[0]  # type: ignore[no-any-return]


def _words(key: Tensor) -> Tensor:
    if key.dtype != torch.int32 or key.shape != (2,):
        raise ValueError(
            f"Expected the words of a key as int32 (2,), got {key.dtype} {list(key.shape)}. Take key.view(torch.int32)."
        )
    return key[None]


def _checked(shape: Sequence[int]) -> list[int]:
    if any(size < 0 for size in shape) or math.prod(shape) >= LIMIT:
        raise ValueError(
            f"Expected a shape of fewer than 2**31 numbers to draw, got {list(shape)}. Split the key to draw more."
        )
    return list(shape)
