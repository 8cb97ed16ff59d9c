"""`torch.func` over a compiled function, against torch.compile around the transform and against eager."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn import functional

import scoped_fn as sf
from tests.bench.measure import Row, medians_us, print_table
from tests.bench.train_step import model_and_batch

Params = dict[str, Tensor]
NO_BAR = float("inf")


class Perceptron(nn.Module):
    """A perceptron 64-128-64 with the mean square error as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.layers(x) - y) ** 2).mean()


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a layer norm. Shape [batch, time, width] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.queries_keys_values(self.norms[0](x)).reshape(batch, time, 3, self.heads, width // self.heads)
        attended = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Four blocks of width 32 with the mean square error as their result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(32, 2) for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.blocks(x) - y) ** 2).mean()


def rows() -> list[Row]:
    found = [*_transformer(), *_samples_of_a_transformer()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bars of the small model are about what a call costs beside its arithmetic
    try:
        return [*found, *_perceptron(), *_first_calls()]
    finally:
        torch.set_num_threads(threads)


def _sides(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Any, sf.CompilerState, Any, Any, Params]:
    """The compiled function, its state, it and eager as functions of the parameters, and these, detached."""
    state, fn = sf.compile(sf.init_state(), model, batch)
    params = {name: p.detach() for name, p in fn.params.items()}
    return fn, state, lambda p, *b: fn(state, p, *b)[1], lambda p, *b: functional_call(model, p, b), params


def _row(what: str, times: dict[str, float], ours: str, theirs: str, bar: float) -> Row:
    a, b = times[ours], times[theirs]
    return Row(what, theirs, f"{a / 1000:.3f} ms", f"{b / 1000:.3f} ms", a / b, bar)


def _transformer() -> list[Row]:
    model, batch = model_and_batch()
    fn, state, ours, eager, params = _sides(model, batch)
    step = sf.value_and_grad(fn)
    compiled_grad = torch.compile(grad(eager), dynamic=False)
    compiled_both = torch.compile(grad_and_value(eager), dynamic=False)
    _close(grad(ours)(params, *batch), compiled_grad(params, *batch))
    times = medians_us(
        {
            "grad(fn)": lambda: grad(ours)(params, *batch),
            "torch.compile(grad(f))": lambda: compiled_grad(params, *batch),
            "value_and_grad(fn)": lambda: step(state, params, *batch),
            "torch.compile(grad_and_value(f))": lambda: compiled_both(params, *batch),
            "eager grad(f)": lambda: grad(eager)(params, *batch),
        },
        rounds=25,
    )
    assert fn.cache_info().eager_calls == 0
    gpt = "GPT 4 x 128"
    return [
        _row(f"torch.func.grad(fn), {gpt}", times, "grad(fn)", "torch.compile(grad(f))", 1.1),
        _row(f"torch.func.grad(fn), {gpt}", times, "grad(fn)", "eager grad(f)", NO_BAR),
        _row(f"sf.value_and_grad(fn), {gpt}", times, "value_and_grad(fn)", "torch.compile(grad_and_value(f))", 1.0),
    ]


def _samples_of_a_transformer() -> list[Row]:
    torch.manual_seed(0)
    one = torch.randn(1, 16, 32), torch.randn(1, 16, 32)
    samples = torch.randn(64, 1, 16, 32), torch.randn(64, 1, 16, 32)
    fn, _, ours, eager, params = _sides(Transformer(), one)
    over = {"in_dims": (None, 0, 0)}
    _close(vmap(grad(ours), **over)(params, *samples), vmap(grad(eager), **over)(params, *samples))
    times = medians_us(
        {
            "vmap(grad(fn))": lambda: vmap(grad(ours), **over)(params, *samples),
            "eager vmap(grad(f))": lambda: vmap(grad(eager), **over)(params, *samples),
        },
        rounds=10,
    )
    assert fn.cache_info().eager_calls == 0
    return [_row("vmap(grad(fn)), 64 samples, transformer 4 x 32", times, "vmap(grad(fn))", "eager vmap(grad(f))", 0.5)]


def _perceptron() -> list[Row]:
    torch.manual_seed(0)
    batch = torch.randn(8, 64), torch.randn(8, 64)
    samples = torch.randn(64, 64), torch.randn(64, 64)
    fn, _, ours, eager, params = _sides(Perceptron(), batch)
    compiled_grad = torch.compile(grad(eager), dynamic=False)
    over_samples = {"in_dims": (None, 0, 0)}
    _close(grad(ours)(params, *batch), grad(eager)(params, *batch))
    _close(vmap(grad(ours), **over_samples)(params, *samples), vmap(grad(eager), **over_samples)(params, *samples))
    times = medians_us(
        {
            "grad(fn)": lambda: grad(ours)(params, *batch),
            "eager grad(f)": lambda: grad(eager)(params, *batch),
            "torch.compile(grad(f))": lambda: compiled_grad(params, *batch),
            "vmap(grad(fn))": lambda: vmap(grad(ours), **over_samples)(params, *samples),
            "eager vmap(grad(f))": lambda: vmap(grad(eager), **over_samples)(params, *samples),
        },
        rounds=100,
        calls=10,
    )
    assert fn.cache_info().eager_calls == 0
    small, many = "perceptron 64-128-64, one thread", "64 samples, perceptron 64-128-64, one thread"
    return [
        _row(f"torch.func.grad(fn), {small}", times, "grad(fn)", "eager grad(f)", 1.0),
        _row(f"torch.func.grad(fn), {small}", times, "grad(fn)", "torch.compile(grad(f))", NO_BAR),
        _row(f"vmap(grad(fn)), {many}", times, "vmap(grad(fn))", "eager vmap(grad(f))", 0.5),
    ]


TRANSFORMS: tuple[tuple[str, Callable[[Any], Callable[..., Any]]], ...] = (
    ("grad", grad),
    ("vmap", lambda f: vmap(f, in_dims=(None, 0, 0))),
    ("vmap(grad)", lambda f: vmap(grad(f), in_dims=(None, 0, 0))),
    ("jvp", lambda f: lambda w, x, y: jvp(lambda w: f(w, x, y), (w,), (w,))),
    ("jacrev", jacrev),
    ("jacfwd", jacfwd),
    ("hessian", hessian),
    ("grad(grad)", lambda f: lambda w, x, y: grad(lambda w: (grad(f)(w, x, y) ** 2).sum())(w)),
)


def _first_calls() -> list[Row]:
    """What the first call of each transform compiles, and how long it and a later one take: reported, no bar."""
    torch.manual_seed(0)
    w, x, y = torch.randn(8, 4), torch.randn(3, 8), torch.randn(3, 4)
    found = []
    for name, transform in TRANSFORMS:
        state, fn = sf.compile(sf.init_state(), lambda w, x, y: ((torch.tanh(x @ w) - y) ** 2).mean(), (w, x, y))
        run = transform(lambda *args, state=state, fn=fn: fn(state, *args)[1])
        before = fn.cache_info().compiled_graphs
        first = _seconds(lambda run=run: run(w, x, y))
        graphs = fn.cache_info().compiled_graphs - before
        later = min(_seconds(lambda run=run: run(w, x, y)) for _ in range(20))
        assert fn.cache_info().compiled_graphs - before == graphs, f"a later call of {name} compiled something"
        assert fn.cache_info().eager_calls == 0
        what = f"{name}: first call, compiling {graphs} graph{'s' * (graphs != 1)}; later call, compiling none"
        found.append(Row(what, "a later call", f"{first:.2f} s", f"{later * 1000:.2f} ms", first / later, NO_BAR))
    return found


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
