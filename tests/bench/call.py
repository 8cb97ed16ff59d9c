"""A call without gradients: a small perceptron through `compile` against `torch.compile`. Bar: 0.8."""

from __future__ import annotations

import sys

import torch
from torch import nn

import scoped_fn as sf
from tests.bench.measure import Row, medians_us, print_table


def rows() -> list[Row]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), torch.randn(32, 64)
    theirs = torch.compile(model, backend="inductor")
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
    ours = f"{times['scoped_fn']:.1f} us"
    return [
        Row(
            "call, no grad, 64-128-64 perceptron",
            name,
            ours,
            f"{times[name]:.1f} us",
            times["scoped_fn"] / times[name],
            bar,
        )
        for name, bar in (("torch.compile", 0.8), ("eager", float("inf")))
    ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
