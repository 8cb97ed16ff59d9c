"""Many compiled functions in one process, on many threads, beside other people's compiled code."""

from __future__ import annotations

import copy
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import scoped_fn as sf
from tests.cases.casekit import weighted_loss
from tests.helpers import assert_same, compiled, fresh, process_unchanged


def _model(seed: int, width: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2))


def _inputs(seed: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))


def _step(state: sf.CompilerState, fn: sf.CompiledFn, params: Any, x: torch.Tensor) -> sf.CompilerState:
    state, out = fn(state, params, x)
    weighted_loss(out).backward()
    return state


def _alone(seed: int, steps: int) -> tuple[Any, Any]:
    state, fn = compiled(_model(seed), (_inputs(0),))
    params = fresh(fn.params)
    for step in range(steps):
        state = _step(state, fn, params, _inputs(step))
    return {name: one.grad for name, one in params.items()}, dict(state.buffers[fn.owner])


def test_twelve_functions_of_one_class_are_as_each_alone() -> None:
    state, engines = sf.init_state(), []
    for seed in range(12):
        state, fn = sf.compile(state, _model(seed), (_inputs(0),), backend="eager")
        engines.append((fn, fresh(fn.params)))
    assert len({fn.owner for fn, _ in engines}) == 12
    for step in range(2):
        for fn, params in engines if step % 2 else reversed(engines):
            state = _step(state, fn, params, _inputs(step))
    for seed, (fn, params) in enumerate(engines):
        grads, buffers = _alone(seed, 2)
        assert_same({name: one.grad for name, one in params.items()}, grads)
        assert_same(dict(state.buffers[fn.owner]), buffers)
        assert fn.cache_info() == (1, 2, 4, 0)


ORDERS = [
    order
    for order in itertools.permutations(["forward a", "forward b", "backward a", "backward b"])
    if all(order.index(f"forward {name}") < order.index(f"backward {name}") for name in "ab")
]


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_forwards_and_backwards_interleave_in_any_order(order: tuple[str, ...]) -> None:
    state, first = compiled(_model(0), (_inputs(0),))
    state, second = sf.compile(state, _model(1), (_inputs(0),), backend="eager")
    engines = {"a": (first, fresh(first.params)), "b": (second, fresh(second.params))}
    losses = {}
    for action, name in (step.split() for step in order):
        fn, params = engines[name]
        if action == "forward":
            state, out = fn(state, params, _inputs(0))
            losses[name] = weighted_loss(out)
        else:
            losses[name].backward()
    for seed, name in enumerate(["a", "b"]):
        grads, buffers = _alone(seed, 1)
        assert_same({key: one.grad for key, one in engines[name][1].items()}, grads)
        assert_same(dict(state.buffers[engines[name][0].owner]), buffers)


def test_releasing_one_leaves_the_other_as_alone() -> None:
    state, first = compiled(_model(0), (_inputs(0),))
    state, second = sf.compile(state, _model(1), (_inputs(0),), backend="eager")
    params = fresh(second.params)
    state, out = second(state, params, _inputs(0))
    state = sf.release(state, first)
    weighted_loss(out).backward()
    state = _step(state, second, params, _inputs(1))
    grads, buffers = _alone(1, 2)
    assert_same({name: one.grad for name, one in params.items()}, grads)
    assert_same(dict(state.buffers[second.owner]), buffers)


def test_a_backward_that_waits_over_a_release_still_runs() -> None:
    model = nn.Linear(3, 2)
    state, fn = compiled(model, (_inputs(0),))
    state, out = fn(state, fn.params, _inputs(0))
    sf.release(state, fn)
    del fn, state
    out.sum().backward()
    assert_same(model.bias.grad, torch.full((2,), 5.0))


def test_two_forwards_before_two_backwards_keep_their_own_inputs() -> None:
    model = nn.Linear(3, 2)
    state, fn = compiled(model, (_inputs(0),))
    outs = [fn(state, fn.params, _inputs(seed))[1] for seed in (1, 2)]
    for seed, out in reversed(list(zip((1, 2), outs, strict=True))):
        model.zero_grad()
        out.sum().backward()
        assert_same(model.weight.grad, _inputs(seed).sum(0).expand(2, 3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_eight_threads_share_one_function(backend: str) -> None:
    state, fn = compiled(_model(0), (_inputs(0),), backend=backend)

    def work(seed: int) -> Any:
        params = fresh(fn.params)
        after = _step(state, fn, params, _inputs(seed))
        return {name: one.grad for name, one in params.items()}, dict(after.buffers[fn.owner])

    alone = [work(seed) for seed in range(8)]
    with process_unchanged(), ThreadPoolExecutor(8) as pool:
        assert_same(list(pool.map(work, range(8))), alone)


def test_threads_compile_at_once() -> None:
    expected = [_alone(seed, 1) for seed in range(4)]
    models = [_model(seed) for seed in range(4)]
    with process_unchanged(), ThreadPoolExecutor(4) as pool:
        assert_same(list(pool.map(_compile_and_step, models)), expected)


def _compile_and_step(model: nn.Module) -> Any:
    state, fn = compiled(model, (_inputs(0),))
    params = fresh(fn.params)
    state = _step(state, fn, params, _inputs(0))
    return {name: one.grad for name, one in params.items()}, dict(state.buffers[fn.owner])


def test_a_new_variant_met_by_many_threads_is_compiled_once() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        state, fn = compiled(model, (_inputs(0),))
    start = threading.Barrier(6)

    def work(_: int) -> torch.Tensor:
        start.wait()
        with torch.no_grad():
            return fn(state, fn.params, torch.ones(9, 3))[1]

    with process_unchanged(), ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(6)))
    assert_same(results, [model(torch.ones(9, 3)).detach()] * 6)
    assert fn.cache_info().captures == 2


def test_a_backward_may_run_in_another_thread() -> None:
    model = nn.Linear(3, 2)
    state, fn = compiled(model, (_inputs(0),))
    loss = fn(state, fn.params, _inputs(0))[1].sum()
    worker = threading.Thread(target=loss.backward)
    worker.start()
    worker.join()
    assert_same(model.bias.grad, torch.full((2,), 5.0))


def test_a_bystander_is_never_compiled_again() -> None:
    counter = CompileCounter()
    bystander_model = _model(5)
    bystander = torch.compile(bystander_model, backend=counter)
    x = _inputs(0)
    bystander(x).sum().backward()
    compiled_before, frames_before = counter.frame_count, dict(counters["frames"])
    state, fn = compiled(_model(0), (x,))
    for step in range(3):
        state = _step(state, fn, fn.params, _inputs(step))
        bystander(x).sum().backward()
    state, other = sf.compile(state, copy.deepcopy(bystander_model), (x,), backend="eager")
    with torch.no_grad():
        fn(state, fn.params, torch.ones(7, 3))
    with pytest.raises(sf.CaptureError):
        sf.compile(state, lambda x: x if x.sum() > 0 else -x, (x,), backend="eager")
    state = sf.release(sf.release(state, fn), other)
    with torch._dynamo.config.patch(error_on_recompile=True):
        bystander(x).sum().backward()
    assert counter.frame_count == compiled_before
    assert compiled_before == 1
    assert counters["frames"].get("ok", 0) >= frames_before.get("ok", 0), "our capture must not reset Dynamo's counters"


def test_a_model_that_is_torch_compiled_elsewhere_still_captures() -> None:
    model, x = _model(0), _inputs(0)
    bystander = torch.compile(model, backend="eager")
    expected = bystander(x)
    state, fn = compiled(_model(0), (x,))
    assert_same(fn(state, fn.params, x)[1], expected, rtol=1e-6, atol=1e-6)
    assert_same(bystander(x), expected, rtol=1e-6, atol=1e-6)
