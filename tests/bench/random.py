"""What random keys cost: uniform numbers against JAX, and dropout from keys against torch's generators.

Bars: 1.3 for 2^20 uniform or normal floats on one core against `jax.random` under `jax.jit`; 1.1 for a training step of
the demo's GPT with dropout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import torch

import scoped_fn as sf
from scoped_fn.demo.gpt import GPT, GPTConfig
from tests.bench.measure import Row, medians_us, print_table

COUNT = 2**20


def rows() -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _one_core():
            floats = _floats()
        return [*floats, *_steps()]
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _one_core() -> Iterator[None]:
    """Keeps every thread of the process on one core: no flag keeps JAX from drawing on all of them."""
    cores = os.sched_getaffinity(0)
    jax.block_until_ready(jax.random.uniform(jax.random.key(0)))  # JAX's threads are there from now on

    def run_on(cores: set[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)

    run_on({min(cores)})
    try:
        yield
    finally:
        run_on(cores)


def _floats() -> list[Row]:
    found = []
    for name, ours, theirs, torchs, bar in (
        ("uniform", torch.rand, jax.random.uniform, torch.rand, 1.3),
        ("normal", torch.randn, jax.random.normal, torch.randn, 1.3),
    ):
        state, fn = sf.compile(sf.init_state(), lambda ours=ours: ours(COUNT), ())
        key, jitted = jax.random.key(0), jax.jit(lambda key, theirs=theirs: theirs(key, (COUNT,)))
        times = medians_us(
            {
                "ours": lambda fn=fn, state=state: fn(state),
                "jax": lambda jitted=jitted, key=key: jitted(key).block_until_ready(),
                "torch": lambda torchs=torchs: torchs(COUNT),
            },
            rounds=31,
        )
        found += [
            _row(f"2^20 {name} floats from the key, compiled", f"jax.random.{name}, jitted", times, "jax", bar),
            _row("the same", f"torch.{torchs.__name__}", times, "torch", float("inf")),
        ]
    return found


def _steps() -> list[Row]:
    config = GPTConfig(layers=4, width=128, context=128, dropout=0.1)
    tokens = torch.randint(0, config.vocabulary, (8, config.context + 1), generator=torch.Generator().manual_seed(1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    steps = {}
    for name, rng in (("ours", "key"), ("torch", "torch")):
        state, fn = sf.compile(sf.init_state(), GPT(config, seed=0), batch, rng=rng)
        step = sf.value_and_grad(fn)
        steps[name] = lambda step=step, state=state, params=fn.params: step(state, params, *batch)
    times = medians_us(steps, rounds=25)
    return [_row("step of the GPT 4 x 128 with dropout from keys", "rng='torch'", times, "torch", 1.1)]


def _row(what: str, baseline: str, times: dict[str, float], other: str, bar: float) -> Row:
    ratio = times["ours"] / times[other]
    return Row(what, baseline, f"{times['ours'] / 1000:.2f} ms", f"{times[other] / 1000:.2f} ms", ratio, bar)


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
