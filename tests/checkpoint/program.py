"""A training program that can be stopped and started again: FP8 with history, batch statistics, dropout, momentum."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import scoped_fn as sf

Run = dict[str, Any]


class Loss(nn.Module):
    """Two layers with a batch norm and dropout between them, down to a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        between = (nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2))
        self.inner = nn.Sequential(nn.Linear(16, 32), *between, nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


def batch(step: int) -> torch.Tensor:
    """The inputs of a step."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def begin() -> tuple[Run, Any]:
    """The run before its first step, and its step, compiled anew."""
    torch.manual_seed(5)
    state = sf.autocast(sf.init_state(key=11), sf.DelayedScaling(amax_history_len=4))
    state, fn = sf.compile(state, Loss(), (batch(0),), backend="eager")
    params = {name: value.detach() for name, value in fn.params.items()}
    momentum = {name: torch.zeros_like(value) for name, value in params.items()}
    return {"state": state, "params": params, "momentum": momentum, "losses": []}, sf.value_and_grad(fn)


def train(run: Run, step: Any, steps: int) -> Run:
    """The run after more steps."""
    for _ in range(steps):
        state, (loss, grads) = step(run["state"], run["params"], batch(len(run["losses"])))
        momentum = {name: 0.9 * value + grads[name] for name, value in run["momentum"].items()}
        params = {name: value - 0.05 * momentum[name] for name, value in run["params"].items()}
        run = {"state": state, "params": params, "momentum": momentum, "losses": [*run["losses"], loss.item()]}
    return run


if __name__ == "__main__":
    source, target, count = sys.argv[1:]
    _, compiled_step = begin()
    sf.save(train(sf.load(source), compiled_step, int(count)), target)
