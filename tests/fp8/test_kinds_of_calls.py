"""Several kinds of calls, scopes and owners: what each needs of the state, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scoped_fn as sf
from tests.fp8.scoped import Run, newest, recipe, rescoped, scales, scoped
from tests.helpers import assert_same


class Deep(nn.Module):
    """One or two layers, as a Python argument says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, deep: bool) -> Tensor:
        x = self.a(x)
        return (self.b(x) if deep else x).square().mean()


def shallow_first() -> tuple[Run, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    return scoped(Deep(), (x, False)), x


def outer(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The generic step: of a stateful function that is not compiled itself."""
    return sf.value_and_grad(lambda state, *args: fn(state, *args))


@pytest.mark.parametrize("of", [sf.value_and_grad, outer])
def test_a_call_with_more_sites_records_them_all_in_its_first_step(of: Callable[..., Any]) -> None:
    run, x = shallow_first()
    state, _ = of(run.fn)(run.state, run.params, x, False)
    assert set(scales(state)) == {"a"}
    state, _ = of(run.fn)(state, run.params, x, True)
    assert all(amax > 0 for site in newest(state).values() for amax in site.values())
    assert set(scales(state)) == {"a", "b"}


def test_an_engine_meets_a_call_with_more_sites() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    engine = sf.Engine(Deep(), (x, False), recipe=recipe(), backend="eager")
    for deep in (False, True, True):
        engine(x, deep).backward()
        engine.end_step()
    found = newest(engine.state)
    assert set(found) == {"a", "b"}
    assert all(amax > 0 for site in found.values() for amax in site.values())


def test_other_kinds_of_calls_stay_compiled_when_one_brings_new_sites() -> None:
    run, x = shallow_first()
    step, state = sf.value_and_grad(run.fn), run.state
    for deep in (False, True):
        state, _ = step(state, run.params, x, deep)
    before = run.fn.cache_info()
    for deep in (False, True, False):
        state, _ = step(state, run.params, x, deep)
    after = run.fn.cache_info()
    assert (after.captures, after.compiled_graphs) == (before.captures, before.compiled_graphs)


def test_a_state_that_is_not_kept_compiles_nothing_again() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    state, fn = sf.compile(sf.init_state(), Deep(), (x, True), backend="eager")
    params = {name: one.detach() for name, one in fn.params.items()}
    calls = (fn, sf.value_and_grad(fn), outer(fn))
    for call in calls:
        first = sf.with_autocast(state, recipe(), call, params, x, True)[1]
        captures = fn.cache_info().captures
        again = sf.with_autocast(state, recipe(), call, params, x, True)[1]
        assert fn.cache_info().captures == captures
        assert_same(again, first)


def test_a_step_ends_only_the_steps_of_owners_that_ran() -> None:
    run, x = shallow_first()
    state, other = sf.compile(run.state, Deep(), (x, False), backend="eager")
    others = {name: one.detach() for name, one in other.params.items()}
    state, _ = sf.value_and_grad(other, accumulate=True)(state, others, x, False)
    staged = state.fp8[other.owner]
    state, _ = outer(run.fn)(state, run.params, x, False)
    assert_same(state.fp8[other.owner].amax_history, staged.amax_history)
    assert state.fp8[run.fn.owner].amax_history[0].eq(0).all()


def test_a_gradient_inside_a_loss_does_not_end_the_step() -> None:
    run, x = shallow_first()

    def penalty(state: sf.CompilerState, params: Any, x: Tensor) -> Any:
        state, slopes = sf.grad(run.fn)(state, params, x, False)
        return state, sum(slope.square().sum() for slope in slopes.values())

    state, _ = sf.value_and_grad(penalty)(run.state, run.params, x)
    steps = {role: sum(amax > 0 for amax in one["history"]) for role, one in scales(state)["a"].items()}
    assert steps == {"input": 1, "weight": 1, "grad_output": 1}


def test_gradients_of_a_mapped_call_inside_a_loss_combine_by_maximum() -> None:
    run, x = shallow_first()

    def loss(state: sf.CompilerState, params: Any, rows: Tensor) -> Any:
        state, values = sf.vmap(run.fn, in_dims=(None, 0, None))(state, params, rows, False)
        return state, values.sum()

    state, _ = sf.value_and_grad(loss)(run.state, run.params, x[:, None])
    alone = [sf.value_and_grad(run.fn)(run.state, run.params, row[None], False)[0] for row in x]
    for role in ("input", "weight", "grad_output"):
        assert newest(state)["a"][role] == max(newest(one)["a"][role] for one in alone)


def test_a_shorter_format_keeps_a_scale_that_fits_where_no_history_is_left() -> None:
    torch.manual_seed(0)
    x, short = torch.randn(4, 8), recipe(amax_history_len=1)
    run = scoped(Deep(), (x, False), short)
    state, _ = sf.value_and_grad(run.fn)(run.state, run.params, x, False)
    other = rescoped(state, recipe(amax_history_len=1, fp8_format=sf.Format.E4M3))
    after, _ = sf.value_and_grad(run.fn, accumulate=True)(other, run.params, x, False)
    assert scales(after)["a"]["grad_output"]["scale"] == scales(state)["a"]["grad_output"]["scale"] / 128


def test_a_traced_call_takes_the_graph_of_its_own_python_arguments() -> None:
    run, x = shallow_first()
    state, wanted = run.fn(run.state, run.params, x, True)
    for deep in (False, True):
        compiled = torch.compile(lambda s, p, x, deep=deep: run.fn(s, p, x, deep)[1], fullgraph=True, backend="eager")
        assert torch.equal(compiled(state, run.params, x), run.fn(state, run.params, x, deep)[1])
    assert not torch.equal(wanted, run.fn(state, run.params, x, False)[1])


@pytest.mark.parametrize("depth", [1, 2])
def test_merge_takes_what_vmap_gives(depth: int) -> None:
    run, x = shallow_first()
    params = {name: one.requires_grad_() for name, one in run.params.items()}
    call: Any = lambda row: run.fn(run.state, params, row[None], False)  # noqa: E731
    rows = x if depth == 1 else torch.stack([x, 2 * x])
    for _ in range(depth):
        call = torch.vmap(call)
    merged = sf.merge(call(rows)[0])
    assert merged.key.shape == (2,)
    assert newest(merged)["a"]["input"] == rows.abs().max()
    assert sf.merge(merged) is merged


class Named(nn.Module):
    """A part called `fp8` whose buffer is called `amax`."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8, self.fc = nn.Module(), nn.Linear(8, 8)
        self.fp8.register_buffer("amax", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.fp8.amax.add_(1)
        return self.fc(x).square().mean()


def test_a_buffer_may_be_called_as_ours_are() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    run = scoped(Named(), (x,))
    state, _ = sf.value_and_grad(run.fn)(run.state, run.params, x)
    assert state.buffers[run.fn.owner]["fp8.amax"] == 1
    assert newest(state)["fc"]["input"] == x.abs().max()
