"""Issues about activations that are computed again, and about several microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf
from tests.fp8.linears import (
    Checkpointed,
    Plain,
    Weighted,
    backward_step,
    delayed,
    detached,
    fp8_tensors,
    history,
    leaves,
    numbers,
    rescoped,
    scoped,
    step,
)
from tests.helpers import assert_same, unchanged

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = delayed(4, amax_compute_algo="most_recent")


class Kept(Checkpointed):
    """The same loss without computing again."""

    def forward(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return (self.fc(x).tanh() * dy).sum()


def by_value_and_grad(state: sf.CompilerState, fn: sf.CompiledFn, x: torch.Tensor) -> sf.CompilerState:
    return sf.value_and_grad(fn)(state, detached(fn), x, numbers(9))[0]


def by_autograd(state: sf.CompilerState, fn: sf.CompiledFn, x: torch.Tensor) -> sf.CompilerState:
    return backward_step(state, lambda state: fn(state, leaves(fn), x, numbers(9)))


@pytest.mark.parametrize("way", [by_value_and_grad, by_autograd], ids=lambda way: way.__name__)
def test_1190_and_415_computing_again_updates_every_scale_once(way: Callable[..., sf.CompilerState]) -> None:
    again, kept = Checkpointed(), Kept()
    kept.load_state_dict(again.state_dict())
    (state, fn), (twin_state, twin) = scoped(RECIPE, again), scoped(RECIPE, kept)
    for seed in range(3):
        state, twin_state = way(state, fn, numbers(seed)), way(twin_state, twin, numbers(seed))
        assert_same(fp8_tensors(state, fn), fp8_tensors(twin_state, twin))
        for role in ("input", "grad_output"):
            assert [one > 0 for one in history(state, fn, role)] == [False] * (3 - seed) + [True] * (seed + 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_3284_a_scope_opens_inside_a_checkpointed_function(reentrant: bool) -> None:
    state, fn = scoped(RECIPE, Plain())
    state, _ = fn(state, leaves(fn), numbers(5))
    base, results = sf.end_autocast(sf.update_scales(state)), []
    for again in (False, True):
        params, x = leaves(fn), numbers(0).requires_grad_()

        def region(x: torch.Tensor, params: Any = params) -> torch.Tensor:
            return fn(sf.autocast(base, RECIPE), params, x)[1]

        y = checkpoint(region, x, use_reentrant=reentrant) if again else region(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, params["fc.weight"].grad))
    assert_same(results[1], results[0])
    assert (results[0][0] - numbers(0) @ fn.params["fc.weight"].detach().T).abs().max() > 1e-3


def test_1723_what_a_pending_backward_needs_does_not_change_with_the_state() -> None:
    state, fn = scoped(RECIPE, Checkpointed())
    state = step(state, fn, x=4, dy=4)
    params = leaves(fn), leaves(fn)
    pending = [fn(state, one, numbers(0), numbers(1))[1] for one in params]
    pending[0].backward()
    with unchanged(fp8_tensors(state, fn)):
        step(state, fn, x=400, dy=400)
        step(rescoped(state, delayed(9)), fn, x=400, dy=400)
    pending[1].backward()
    assert_same(params[1]["fc.weight"].grad, params[0]["fc.weight"].grad)


class Pipeline:
    """Two stages, each computed again in backward; the state is threaded through every piece of work."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.state, self.first = scoped(RECIPE, Plain())
        self.state, self.last = scoped(RECIPE, Weighted(), state=self.state)
        self.params = leaves(self.first), leaves(self.last)
        self.pending: dict[int, Any] = {}

    def forward(self, microbatch: int) -> None:
        start, sinks = sf.watch_gradients(self.state)

        def run(x: torch.Tensor) -> Any:
            state, h = self.first(start, self.params[0], x)
            return self.last(state, self.params[1], h, numbers(50 + microbatch))

        self.state, loss = checkpoint(run, numbers(microbatch).requires_grad_(), use_reentrant=False)
        self.pending[microbatch] = loss, sinks

    def backward(self, microbatch: int) -> None:
        loss, sinks = self.pending.pop(microbatch)
        loss.backward()
        self.state = sf.stage_gradients(self.state, sinks)


def run_in_order(order: str) -> tuple[list[Any], list[Any]]:
    """The gradients of the parameters, and the FP8 tensors of each stage."""
    stages = Pipeline()
    for work in order.split():
        (stages.forward if work[0] == "F" else stages.backward)(int(work[1]))
    state = sf.update_scales(stages.state)
    grads = [one.grad for params in stages.params for one in params.values()]
    return grads, [fp8_tensors(state, fn) for fn in (stages.first, stages.last)]


@pytest.mark.parametrize("order", ["F0 F1 B0 F2 B1 B2", "F0 F1 F2 B2 B1 B0"])
def test_539_interleaved_microbatches_equal_serial_ones(order: str) -> None:
    serial, interleaved = run_in_order("F0 B0 F1 B1 F2 B2"), run_in_order(order)
    assert_same(interleaved, serial, rtol=1e-6, atol=1e-6)
    assert all(one.isfinite().all() for one in serial[0])
    for held in serial[1]:
        assert held["amax_history"][-1].gt(0).all()
        assert held["amax_history"][:-1].eq(0).all()
    largest = max(numbers(microbatch).abs().max().item() for microbatch in range(3))
    assert serial[1][0]["amax_history"][-1].eq(largest).any()


@pytest.mark.parametrize("inside", [True, False])
def test_1935_and_megatron_7538_a_recomputation_has_the_scope_of_its_forward(inside: bool) -> None:
    state, fn = scoped(RECIPE, Checkpointed())
    state = step(state, fn, x=4, dy=4)
    results = []
    for elsewhere in (False, True):
        params = leaves(fn)
        _, loss = fn(state, params, numbers(0), numbers(1))
        if elsewhere:
            other = sf.autocast(state, None, enabled=False) if inside else sf.end_autocast(state)
            fn(other, params, numbers(2), numbers(3))
        loss.backward()
        results.append(params["fc.weight"].grad)
    assert_same(results[1], results[0])
