"""A call without gradients: a small perceptron through `compile` against `torch.compile`. Bar: 0.8.

On one thread: the bar is about what a call costs beside its arithmetic, and waking a second thread costs more.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import scoped_fn as sf
from tests.bench.measure import Row, medians_us, print_table


def rows() -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row for batch, bar in ((8, 0.8), (128, float("inf"))) for row in _rows(batch, bar)]
    finally:
        torch.set_num_threads(threads)


def _rows(batch: int, bar: float) -> list[Row]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), torch.randn(batch, 64)
    theirs = torch.compile(model, backend="inductor", dynamic=False)
    with torch.no_grad():
        state, fn = sf.compile(sf.init_state(), model, (x,))
        params = fn.params
        torch.testing.assert_close(fn(state, params, x)[1], theirs(x))
        times = medians_us(
            {
                "scoped_fn": lambda: fn(state, params, x),
                "torch.compile": lambda: theirs(x),
                "eager": lambda: model(x),
            },
            rounds=200,
            calls=50,
        )
    return [
        Row(
            f"call, no grad, perceptron 64-128-64, batch {batch}, one thread",
            name,
            f"{times['scoped_fn']:.1f} us",
            f"{times[name]:.1f} us",
            times["scoped_fn"] / times[name],
            own_bar,
        )
        for name, own_bar in (("torch.compile", bar), ("eager", float("inf")))
    ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
