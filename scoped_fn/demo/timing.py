"""The time of a training step, of several contestants measured side by side."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from scoped_fn.demo.train import Carry, Engine

ROUNDS = 12

Contestants = Mapping[str, Callable[[], None]]


def compare_steps(carry: Carry, engine: Engine, batch: tuple[Tensor, Tensor], *, backend: str) -> dict[str, float]:
    """Returns the median milliseconds of a forward and backward by contestant; only scoped_fn quantizes."""
    model = copy.deepcopy(engine.model)
    contestants = {
        "scoped_fn": step_of(carry, engine, batch),
        "torch.compile": _autograd_step(model, torch.compile(model, backend=backend), batch),
        "eager": _autograd_step(model, model, batch),
    }
    with torch.random.fork_rng(devices=[]):  # the other two draw dropout from the global generator
        return median_ms(contestants)


def median_ms(contestants: Contestants) -> dict[str, float]:
    """Returns the median milliseconds of a call by contestant, after one call of each that is not counted."""
    for run in contestants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):  # in turn, so that another program's load falls on all of them
        for name, run in contestants.items():
            started = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(each) for name, each in times.items()}


def step_of(carry: Carry, engine: Engine, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """Returns a call of the engine's step, whose results are dropped."""
    return lambda: _discard(engine.step(carry.state, carry.params, *batch))


def _autograd_step(
    model: nn.Module, forward: Callable[..., Tensor], batch: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        forward(*batch).backward()  # type: ignore[no-untyped-call]

    return run


def _discard(_: object) -> None:
    return None
