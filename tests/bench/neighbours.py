"""What compiling costs the rest of the process: recompilations of a bystander, and memory that stays. Bars: 0."""

from __future__ import annotations

import gc
import sys
import weakref

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import scoped_fn as sf
from tests.bench.measure import Row, print_table
from tests.bench.train_step import model_and_batch


def recompilations() -> int:
    """How often a bystander's `torch.compile`d function is compiled again while we compile, train, fail and release."""
    counter = CompileCounterWithBackend("inductor")
    bystander, x = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend=counter), torch.randn(4, 8)
    bystander(x).sum().backward()
    before = counter.frame_count
    model, batch = model_and_batch()
    state, fn = sf.compile(sf.init_state(), model, batch)
    for _ in range(3):
        state, loss = fn(state, fn.params, *batch)
        loss.backward()
        bystander(x).sum().backward()
    try:
        sf.compile(state, lambda y: y if y.sum() > 0 else -y, (x,))
    except sf.CaptureError:
        bystander(x).sum().backward()
    sf.release(state, fn)
    bystander(x).sum().backward()
    return counter.frame_count - before


def leftovers() -> int:
    """How many of the objects that a compiled function held are alive after `release` and after dropping it."""
    watched: list[weakref.ref[object]] = []

    def run() -> None:
        model, batch = model_and_batch()
        state, fn = sf.compile(sf.init_state(), model, batch)
        state, loss = fn(state, fn.params, *batch)
        loss.backward()
        graphs = [fn.captured.graph.gm, fn.joint_graph.gm, fn.forward_graph.gm, fn.backward_graph.gm]
        watched.extend(weakref.ref(one) for one in (model, fn, loss, *graphs, *model.parameters(), *batch))
        sf.release(state, fn)

    run()
    gc.collect()
    return sum(one() is not None for one in watched)


def rows() -> list[Row]:
    again, left = recompilations(), leftovers()
    return [
        Row("a bystander's recompilations", "its first compilation", str(again), "0", float(again), 0.0),
        Row("objects alive after release", "before the compile", str(left), "0", float(left), 0.0),
    ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
