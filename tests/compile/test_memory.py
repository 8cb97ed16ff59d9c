"""After `release`, and when the function is dropped, nothing stays alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.helpers import compiled


class Holder(nn.Module):
    """Has a parameter, a buffer and a constant that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("mean", torch.zeros(64))
        self.constant = torch.randn(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return (x @ self.weight + self.constant).relu() * self.mean


def _alive(watched: dict[str, weakref.ref[Any]]) -> list[str]:
    gc.collect()
    return [name for name, reference in watched.items() if reference() is not None]


def _watch(**objects: Any) -> dict[str, weakref.ref[Any]]:
    return {name: weakref.ref(one) for name, one in objects.items()}


def _train_and_evaluate(backend: str) -> dict[str, weakref.ref[Any]]:
    model, x = Holder(), torch.randn(8, 64)
    state, fn = compiled(model, (x,), backend=backend)
    state, out = fn(state, fn.params, x)
    out.sum().backward()
    with torch.no_grad():
        state, _ = fn(state, fn.params, torch.randn(3, 64))
    watched = _watch(
        model=model,
        weight=model.weight,
        gradient=model.weight.grad,
        buffer=model.mean,
        constant=model.constant,
        state_buffer=state.buffers[fn.owner]["mean"],
        input=x,
        output=out,
        fn=fn,
        forward_graph=fn.forward_graph.gm,
        backward_graph=fn.backward_graph.gm,
        joint_graph=fn.joint_graph.gm,
        captured_graph=fn.captured.graph.gm,
    )
    state = sf.release(state, fn)
    assert fn.owner not in state.buffers
    return watched


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_everything_dies_with_the_function(backend: str) -> None:
    assert _alive(_train_and_evaluate(backend)) == []


def test_a_traced_function_dies_too() -> None:
    def run() -> dict[str, weakref.ref[Any]]:
        model, x = Holder(), torch.randn(8, 64)
        _, fn = compiled(model, (x,), capture="trace")
        return _watch(model=model, weight=model.weight, constant=model.constant, fn=fn, graph=fn.captured.graph.gm)

    assert _alive(run()) == []


def test_value_and_grad_keeps_nothing() -> None:
    def run() -> dict[str, weakref.ref[Any]]:
        big = torch.randn(64)
        state, fn = compiled(lambda x: (x * big).sum(), (torch.ones(64),))
        step = sf.value_and_grad(fn)
        step(state, torch.ones(64))
        return _watch(fn=fn, big=big, graph=fn.captured.graph.gm)

    assert _alive(run()) == []


def test_a_failed_compile_keeps_nothing() -> None:
    def fails(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        raise RuntimeError("this pass always fails")

    def run() -> dict[str, weakref.ref[Any]]:
        model, x = Holder(), torch.randn(8, 64)
        with pytest.raises(RuntimeError, match="always fails"):
            compiled(model, (x,), passes=sf.Passes(backward=fails))
        return _watch(model=model, weight=model.weight, constant=model.constant, input=x)

    assert _alive(run()) == []


def test_inputs_of_the_example_call_are_not_kept() -> None:
    def run() -> tuple[sf.CompiledFn, dict[str, weakref.ref[Any]]]:
        model, x = nn.Linear(64, 64), torch.randn(8, 64)
        state, fn = compiled(model, (x,))
        _, out = fn(state, fn.params, x)
        return fn, _watch(input=x, output=out)

    fn, watched = run()
    assert _alive(watched) == []
    assert fn.cache_info().captures == 1


def test_what_a_forward_saved_dies_with_its_backward() -> None:
    saved: list[weakref.ref[Any]] = []
    x, weight = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)
    state, fn = compiled(lambda x: (x @ weight).exp(), (x,))
    for _ in range(3):
        _, out = fn(state, x)
        saved.append(weakref.ref(out))
        out.sum().backward()
        del out
        gc.collect()
    assert [reference() for reference in saved] == [None] * 3


def test_a_dropped_forward_frees_what_it_saved() -> None:
    computed: list[weakref.ref[Any]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        def run(*tensors: torch.Tensor) -> Any:
            results = gm(*tensors)
            computed.extend(weakref.ref(one) for one in results)
            return results

        return run

    x = torch.randn(64, 64, requires_grad=True)
    state, fn = compiled(lambda x: x.sigmoid().cumsum(0).exp(), (x,), backend=backend)
    _, out = fn(state, x)
    assert len(computed) > 1
    assert all(reference() is not None for reference in computed), "what is saved lives until the backward"
    del out
    gc.collect()
    assert [reference() for reference in computed] == [None] * len(computed)


def test_ten_compiles_in_a_row_leave_no_objects_behind() -> None:
    def once() -> None:
        model, x = nn.Linear(4, 4), torch.randn(2, 4)
        state, fn = compiled(model, (x,))
        fn(state, fn.params, x)[1].sum().backward()
        sf.release(state, fn)

    def count(kind: type) -> int:
        gc.collect()
        return sum(issubclass(type(one), kind) for one in gc.get_objects())

    kinds: list[type] = [torch.fx.GraphModule, torch.Tensor, sf.CompiledFn]
    counted: list[Callable[[], int]] = [lambda kind=kind: count(kind) for kind in kinds]
    once()
    before = [one() for one in counted]
    for _ in range(10):
        once()
    assert [one() for one in counted] == before
