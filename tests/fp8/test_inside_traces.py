"""A function in FP8 inside another that is traced: the same values, state and purity as outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scoped_fn as sf
from tests.fp8.scoped import Run, example, rescoped, scoped


def traced(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="eager")


def test_a_step_records_all_amaxes() -> None:
    run, data = example()
    step = sf.value_and_grad(run.fn)
    state, wanted = step(run.state, run.params, *data[0])
    found, got = traced(lambda state, params, x, y: step(state, params, x, y))(run.state, run.params, *data[0])
    assert sf.tree_equal(found, state)
    assert torch.equal(got[0], wanted[0])


def test_a_gradient_by_torch_func_records_the_forward() -> None:
    run, data = example()

    def slopes(state: sf.CompilerState, params: Any, x: Tensor, y: Tensor) -> Any:
        def loss(params: Any) -> Any:
            after, value = run.fn(state, params, x, y)
            return value, after

        return torch.func.grad(loss, has_aux=True)(params)

    wanted, state = slopes(run.state, run.params, *data[0])
    got, found = traced(slopes)(run.state, run.params, *data[0])
    assert sf.tree_equal(found, state)
    for name, slope in wanted.items():
        assert torch.equal(got[name], slope)


def test_calibration_records() -> None:
    run, data = example()
    state = rescoped(run.state, sf.DelayedScaling(amax_history_len=4), calibrating=True)
    wanted, _ = run.fn(state, run.params, *data[0])
    found, _ = traced(lambda state, params, x, y: run.fn(state, params, x, y))(state, run.params, *data[0])
    assert sf.tree_equal(found, wanted)
    assert not sf.tree_equal(found, state)


class Scaled(nn.Module):
    """A layer whose call takes Python arguments and one of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, k: float = 2.0, *, y: Tensor | None = None, z: Tensor | None = None) -> Tensor:
        made = self.fc(x) * k
        return made if y is None and z is None else made + y if y is not None else made - z


def of_all_kinds() -> tuple[Run, Tensor, list[dict[str, Any]]]:
    torch.manual_seed(0)
    x, other = torch.randn(4, 8), torch.randn(4, 8)
    run = scoped(Scaled(), (x,))
    kinds: list[dict[str, Any]] = [{}, {"k": 3.0}, {"y": other}, {"z": other}]
    for kind in kinds:
        run.fn(run.state, run.params, x, **kind)
    return run, x, kinds


def test_each_kind_of_call_runs_its_own_graph() -> None:
    run, x, kinds = of_all_kinds()
    for kind in kinds:
        call = traced(lambda state, params, x, kind=kind: run.fn(state, params, x, **kind)[1])
        assert torch.equal(call(run.state, run.params, x), run.fn(run.state, run.params, x, **kind)[1])


def test_a_kind_of_call_that_is_new_is_refused() -> None:
    run, x, _ = of_all_kinds()
    with pytest.raises(Exception, match="(?s)SpecError|got a new kind of call"):
        traced(lambda state, params, x: run.fn(state, params, x, 5.0))(run.state, run.params, x)


class Normed(nn.Module):
    """A layer and batch statistics, which change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)).square().mean()


@pytest.mark.parametrize("with_gradients", [False, True])
def test_buffers_come_back_and_the_old_state_keeps_its_own(with_gradients: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    run = scoped(Normed(), (x,))
    call = sf.value_and_grad(run.fn) if with_gradients else run.fn
    before = run.state.buffers[run.fn.owner]["norm.running_mean"].clone()
    wanted, _ = call(run.state, run.params, x)
    found, _ = traced(lambda state, params, x: call(state, params, x))(run.state, run.params, x)
    assert torch.equal(run.state.buffers[run.fn.owner]["norm.running_mean"], before)
    assert sf.tree_equal(found, wanted)


def test_a_gradient_inside_a_compiled_loss_does_not_end_the_step() -> None:
    run, data = example()

    def step(state: sf.CompilerState, params: Any, x: Tensor, y: Tensor) -> Any:
        def penalty(state: sf.CompilerState, params: Any) -> Any:
            state, slopes = sf.grad(run.fn)(state, params, x, y)
            return state, sum(slope.square().sum() for slope in slopes.values())

        return sf.value_and_grad(penalty)(state, params)

    wanted, _ = step(run.state, run.params, *data[0])
    outer, compiled = sf.compile(sf.init_state(), step, (run.state, run.params, *data[0]), backend="eager")
    _, (found, _) = compiled(outer, run.state, run.params, *data[0])
    assert sf.tree_equal(found, wanted)
