"""Engines side by side, and passes that save memory: counts, bytes that stay alive, peaks of the demo model."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import scoped_fn as sf
from scoped_fn._node_by_node import Steps, run_steps
from scoped_fn._profile import NodeProfile
from scoped_fn.demo.gpt import GPT, GPTConfig
from scoped_fn.passes.order_for_memory import ordered
from scoped_fn.stages import Split, apply_backward, capture, lower_training, partition
from tests.bench.measure import Row, medians_us, print_table

STEPS, ENGINES = 50, 12


def rows() -> list[Row]:
    return [*_waiting(), _twelve(), *_ordered(), *_budget()]


class Recorder:
    """A backend that counts compiles and keeps weak references to what compiled code returns."""

    def __init__(self) -> None:
        self.compiled = 0
        self.results: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*tensors: torch.Tensor) -> Any:
            results = gm(*tensors)
            own = [each for each in results if not any(each is given for given in tensors)]
            self.results += [weakref.ref(each) for each in own if isinstance(each, torch.Tensor)]
            return results

        return run


def _mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def _waiting() -> list[Row]:
    x, recorder = torch.randn(8, 16), Recorder()
    state, first = sf.compile(sf.init_state(), _mlp(0), (x,), backend=recorder)
    state, second = sf.compile(state, _mlp(1), (x,), backend="eager")
    state, waits = second(state, second.params, x)  # its backward never comes
    alive, marks = 0, [0]
    for _ in range(STEPS):
        before = len(recorder.results)
        state, y = first(state, first.params, x)
        assert any(each() is not None for each in recorder.results[before:]), "what is saved lives until the backward"
        y.sum().backward()
        marks.append(len(recorder.results))
        if len(marks) > 3:
            del y
            alive = max(alive, sum(each() is not None for each in recorder.results[marks[-4] : marks[-3]]))
        for parameter in first.params.values():
            parameter.grad = None
    waits.sum().backward()  # it comes after all
    assert all(parameter.grad is not None for parameter in second.params.values())
    assert first.cache_info()[1:] == (2, 2 * STEPS, 0), "a forward and a backward, never eager"
    compiled = recorder.compiled - 1  # without the forward
    return [
        _count(f"compiles of A's backward while B's waits, {STEPS} steps", compiled, 1),
        _count("results of A's code alive two steps later", alive, 0),
    ]


def _twelve() -> Row:
    x, state, engines = torch.randn(8, 16), sf.init_state(), []
    for seed in range(ENGINES):
        recorder = Recorder()
        state, fn = sf.compile(state, _mlp(seed), (x,), backend=recorder)
        engines.append((fn, recorder))
    for _ in range(2):
        losses = [fn(state, fn.params, x)[1].sum() for fn, _ in engines]
        for loss in reversed(losses):
            loss.backward()
    counts = [recorder.compiled == 2 and fn.cache_info().eager_calls == 0 for fn, recorder in engines]
    return Row(
        f"{ENGINES} engines of one class, not compiled", "", str(counts.count(False)), "", counts.count(False), 0
    )


def _ordered() -> list[Row]:
    made = []
    for backend, bar in (("inductor", 0.9), ("eager", float("inf"))):
        split, tensors = _demo_split(backend)
        _, better = apply_backward(sf.init_state(), split, ordered)
        (saved, plain), (_, after) = _backward_peak(split, tensors), _backward_peak(better, tensors)
        # Node by node, as the backend "eager" runs a graph. Inductor makes kernels of it in an order of its own.
        what = f"peak of the demo model's backward graph, lowered for {backend}, node by node, order_for_memory"
        made.append(_megabytes(f"{what}, beyond what it is given", "as it is", after, plain, bar))
        made.append(_megabytes(f"{what}, with what is saved", "as it is", saved + after, saved + plain, float("inf")))
    return made


def _demo_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(256, (16, 129), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def _demo_split(backend: str) -> tuple[Split, list[torch.Tensor]]:
    model, batch = GPT(GPTConfig(), seed=0), _demo_batch()
    state, captured = capture(sf.init_state(), model, batch)
    state, joint = lower_training(state, captured, backend=backend)
    params = [each.detach() for each in captured.source.params.values()]
    return partition(state, joint)[1], [*params, *captured.constants, *batch]


def _backward_peak(split: Split, tensors: list[torch.Tensor]) -> tuple[int, int]:
    """Bytes in use when the backward begins, and the most it adds to them, as it really runs."""
    nodes: list[NodeProfile] = []
    steps = Steps("forward", split.forward.gm, split.backward.gm, split.joint.num_forward)
    with torch.no_grad():
        run_steps(steps, tensors, nodes)
    base = [node for node in nodes if node.graph == "forward"][-1].live_bytes
    return base, max(node.peak_bytes for node in nodes if node.graph == "backward") - base


def _budget() -> list[Row]:
    model, batch = GPT(GPTConfig(), seed=0), _demo_batch()
    state, fn = sf.compile(sf.init_state(), model, batch, backend="eager")
    state, less = sf.recompile(sf.push_inputs(state, fn, batch), fn, sf.passes.memory_budget(0.5))
    saved = [each._split.saved_bytes for each in (less, fn) if each._split is not None]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    grads = [_gradients(state, each, model, batch) for each in (less, fn)]
    torch.set_num_threads(threads)
    assert len(grads[0]) == sum(each.requires_grad for each in model.parameters())
    different = sum(not torch.equal(one, other) for one, other in zip(*grads, strict=True))
    steps = {name: lambda f=f: _gradients(state, f, model, batch) for name, f in (("less", less), ("plain", fn))}
    times = medians_us(steps, rounds=7)
    return [
        _megabytes("bytes that the demo model saves, memory_budget(0.5)", "without", *saved, 0.5),
        _count("its gradients that differ in a bit, backend eager", different, 0),
        Row("its step", "without", f"{times['less'] / 1e3:.0f} ms", f"{times['plain'] / 1e3:.0f} ms",
            times["less"] / times["plain"], float("inf")),
    ]  # fmt: skip


def _gradients(state: Any, fn: Any, model: nn.Module, batch: Any) -> list[torch.Tensor]:
    model.zero_grad()
    fn(state, fn.params, *batch)[1].backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def _count(what: str, number: int, bar: float) -> Row:
    return Row(what, "", str(number), "", number, bar)


def _megabytes(what: str, baseline: str, ours: int, theirs: int, bar: float) -> Row:
    return Row(what, baseline, f"{ours / 2**20:.2f} MiB", f"{theirs / 2**20:.2f} MiB", ours / theirs, bar)


if __name__ == "__main__":
    sys.exit(0 if print_table(rows()) else 1)
