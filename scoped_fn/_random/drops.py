"""Dropout of every kind, and other layers that draw in training: functions with the key before torch's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scoped_fn import random
from scoped_fn._elementary import attention_with
from scoped_fn._random.operations import check, into, wide

SELU_ALPHA = 1.7580993408473766  # of self-normalizing networks (Klambauer et al., 2017): scale times alpha


def keep(key: Tensor, x: Tensor, p: float, shape: Sequence[int] | None = None) -> Tensor:
    """Returns which elements stay, with probability 1 - p: bool, of the shape of `x` by default."""
    check(0 <= p <= 1, "a probability from 0 to 1 to drop elements with", p)
    return random.bernoulli(key.to(x.device), 1 - p, x.shape if shape is None else shape)


def dropped(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Returns the kept elements, scaled up, and zeros."""
    return torch.where(kept, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)


def dropout(key: Tensor, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.dropout`."""
    return into(x, dropped(x, keep(key, x, p), p), inplace)


def native_dropout(key: Tensor, x: Tensor, p: float, training: bool | None) -> tuple[Tensor, Tensor]:
    """`torch.native_dropout`: the result, and which elements stay."""
    kept = keep(key, x, p)
    return dropped(x, kept, p), kept


def feature_dropout(
    key: Tensor, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, dim: int = 0
) -> Tensor:
    """`torch.nn.functional.dropout1d` and its like: whole channels. An input of `dim` dimensions is no batch."""
    kept = keep(key, x, p, _channels(x, dim))
    return into(x, dropped(x, kept, p), inplace)


def alpha_dropout(key: Tensor, x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.alpha_dropout`."""
    return into(x, _alpha(x, keep(key, x, p), p), inplace)


def feature_alpha_dropout(
    key: Tensor, x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """`torch.nn.functional.feature_alpha_dropout`."""
    return into(x, _alpha(x, keep(key, x, p, _channels(x, 0)), p), inplace)


def _channels(x: Tensor, unbatched: int) -> list[int]:
    leading = 1 if x.dim() == unbatched else 2
    return [*x.shape[:leading], *[1] * (x.dim() - leading)]


def _alpha(x: Tensor, kept: Tensor, p: float) -> Tensor:
    if p == 1:
        return x * 0.0
    a = ((SELU_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    shift = SELU_ALPHA * a * p
    return torch.where(kept, x * a + shift, shift - SELU_ALPHA * a).to(x.dtype)


def scaled_dot_product_attention(
    key: Tensor, query: Tensor, keys: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.scaled_dot_product_attention`, by its definition."""
    drop = lambda weights: dropout(key, weights, dropout_p)  # noqa: E731
    return attention_with(drop, query, keys, value, attn_mask, is_causal, scale=scale, enable_gqa=enable_gqa)


def fractional_max_pool(
    target: Callable[..., Any], dims: int, key: Tensor, x: Tensor, *args: Any, **options: Any
) -> Any:
    """`torch.nn.functional.fractional_max_pool2d` and its like: where the regions of each channel begin."""
    batch = 1 if x.dim() == dims + 1 else x.shape[0]
    samples = random.uniform(key.to(x.device), (batch, x.shape[-dims - 1], dims), x.dtype)
    return target(x, *args, **{**options, "_random_samples": samples})


def rrelu(
    key: Tensor, x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.rrelu`."""
    slopes = random.uniform(key.to(x.device), x.shape, wide(x.dtype), lower, upper).to(x.dtype)
    return into(x, torch.where(x <= 0, x * slopes, x), inplace)
