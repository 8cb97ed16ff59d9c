"""The step time of the same model through scoped_fn, torch.compile and eager, measured side by side."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from scoped_fn.demo.train import Carry, Engine

ROUNDS = 12


def compare_steps(carry: Carry, engine: Engine, batch: tuple[Tensor, Tensor], *, backend: str) -> dict[str, float]:
    """Returns the median milliseconds of a forward and backward by contestant, `torch.compile` compiled first."""
    model = copy.deepcopy(engine.model)
    contestants: dict[str, Callable[[], None]] = {
        "scoped_fn": lambda: _discard(engine.step(carry.state, carry.params, *batch)),
        "torch.compile": _autograd_step(model, torch.compile(model, backend=backend), batch),
        "eager": _autograd_step(model, model, batch),
    }
    for run in contestants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):  # in turn, so that another program's load falls on all of them
        for name, run in contestants.items():
            started = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(each) for name, each in times.items()}


def _autograd_step(
    model: nn.Module, forward: Callable[..., Tensor], batch: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        forward(*batch).backward()  # type: ignore[no-untyped-call]

    return run


def _discard(_: object) -> None:
    return None
