"""Recurrent networks of several layers with dropout between them, which torch's own traces lose in silence (2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scoped_fn import random
from scoped_fn._random.drops import dropout


def drops(args: tuple[Any, ...]) -> bool:
    """Returns whether a call of `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` drops something."""
    layers, p, training = _options(args)[1:4]
    return bool(training and p > 0 and layers > 1)


def _options(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns has_biases, num_layers, dropout, train and what follows; a packed sequence has one argument before."""
    return args[_first_option(args) :]


def _first_option(args: tuple[Any, ...]) -> int:
    return 3 if isinstance(args[3], bool) else 4


def layer_by_layer(target: Callable[..., Any], words: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Returns what `target(*args)` does; dropout after layer i draws with `fold_in(key, i)`.

    Args:
        target: `torch.lstm` or its like.
        words: int32 (2,), a key.
        args: Its arguments: input, batch sizes of a packed sequence, first hidden state or states, weights, options.
    """
    first = _first_option(args)
    x, *sizes = args[: first - 2]
    hidden, weights = args[first - 2 : first]
    biases, layers, p, training, bidirectional, *rest = args[first:]
    states = list(hidden) if isinstance(hidden, (tuple, list)) else [hidden]
    ways, count = (2 if bidirectional else 1), len(weights) // layers
    last: list[list[Tensor]] = []
    for i in range(layers):
        own = [state[i * ways : (i + 1) * ways] for state in states]
        given = own if isinstance(hidden, (tuple, list)) else own[0]
        part = weights[i * count : (i + 1) * count]
        x, *ends = target(x, *sizes, given, part, biases, 1, 0.0, training, bidirectional, *rest)
        last.append(ends)
        if i + 1 < layers:
            x = dropout(random.fold_in(words, i), x, p)
    return (x, *(torch.cat(ends) for ends in zip(*last, strict=True)))
