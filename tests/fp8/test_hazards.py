"""Eighteen ways in which FP8 state that a whole process shares goes wrong (H1 to H18); none can happen here."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.fp8.linears import (
    Checkpointed,
    Plain,
    Weighted,
    column,
    delayed,
    detached,
    fp8_tensors,
    history,
    leaves,
    numbers,
    rescoped,
    scale,
    scoped,
    spike,
    step,
    steps,
)
from tests.helpers import assert_same, tensors, unchanged

pytestmark = pytest.mark.usefixtures("one_thread")

MAX, NEWEST = delayed(4), delayed(4, amax_compute_algo="most_recent")


def whole(function: Callable[..., Any], graphs: list[Any]) -> Callable[..., Any]:
    """The function as one graph of torch.compile, kept in the list."""

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def test_h1_an_enabled_scope_inside_a_disabled_one_updates() -> None:
    state, fn = scoped(MAX, state=sf.autocast(sf.init_state(), None, enabled=False))
    state = steps(state, fn, 4, 4, 4)
    state = sf.end_autocast(sf.end_autocast(state))
    assert scale(state, fn) == 112
    assert history(state, fn) == [0, 4, 4, 4]


def test_h2_each_of_two_nested_scopes_has_its_own_rule() -> None:
    state, outer = scoped(MAX)
    state, inner = scoped(NEWEST, state=state)
    for amax in (8, 1):
        state = step(state, inner, x=amax)
        state = sf.autocast(step(sf.end_autocast(state), outer, x=amax), NEWEST)
    assert (scale(state, outer), scale(state, inner)) == (56, 448)


FAILURES: dict[str, Callable[[sf.CompilerState], Any]] = {
    "dtype": lambda state: scoped(sf.NVFP4BlockScaling(), Plain().double(), spike(1).double(), state=state),
    "recipe": lambda state: sf.autocast(state, "delayed"),
    "layer": lambda state: scoped(MAX, state=state, skip=("no_such_layer",)),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_h3_a_scope_that_fails_leaves_nothing_behind(failure: str) -> None:
    state, fn = scoped(MAX)
    with unchanged(state), pytest.raises((ValueError, TypeError)):
        FAILURES[failure](state)
    assert len(state.autocast) == 1
    assert scale(step(state, fn, x=2), fn) == 224


def test_h4_evaluation_without_gradients_records_nothing() -> None:
    state, fn = scoped(NEWEST)
    state = step(state, fn, x=2)
    with torch.no_grad():
        evaluated, _ = fn(state, fn.params, spike(100), spike(1))
    assert_same(fp8_tensors(evaluated, fn), fp8_tensors(state, fn))
    assert scale(step(evaluated, fn, x=2), fn) == 224


def largest_of(past: torch.Tensor) -> torch.Tensor:
    return past.amax(0)


@pytest.mark.parametrize("rule", ["max", largest_of], ids=["max", "own"])
def test_h5_a_region_in_which_nothing_ran_rolls_nothing(rule: Any) -> None:
    recipe = delayed(4, amax_compute_algo=rule)
    state, fn = scoped(recipe)
    state = steps(state, fn, 8, 2)
    again, _ = sf.with_autocast(state, recipe, lambda inner: (sf.update_scales(inner), None))
    assert_same(fp8_tensors(again, fn), fp8_tensors(state, fn))
    assert history(again, fn) == [0, 0, 8, 2]


def test_h6_gradients_are_updated_once_whatever_the_scopes() -> None:
    state, outer = scoped(MAX)
    state, inner = scoped(NEWEST, state=state)
    state = sf.end_autocast(state)

    def loss(state: sf.CompilerState, a: Any, b: Any, x: Any, dy: Any) -> tuple[sf.CompilerState, torch.Tensor]:
        state, first = sf.with_autocast(state, NEWEST, inner, b, x, dy)
        state, second = outer(state, a, x, 2 * dy)
        return state, first + second

    train = sf.value_and_grad(loss, argnums=(0, 1))
    for done in (1, 2):
        state, _ = train(state, detached(outer), detached(inner), spike(3), spike(4))
        assert history(state, inner, "grad_output") == [0] * (4 - done) + [4] * done
        assert history(state, outer, "grad_output") == [0] * (4 - done) + [8] * done
        assert history(state, outer) == [0] * (4 - done) + [3] * done


def test_h7_another_margin_acts_on_the_next_step_and_compiles_nothing() -> None:
    state, fn = scoped(delayed(4))
    state = step(state, fn, x=2)
    assert scale(state, fn) == 224
    graphs = fn.cache_info().compiled_graphs
    state = step(rescoped(state, delayed(4, margin=3)), fn, x=2)
    assert scale(state, fn) == 28
    assert fn.cache_info().compiled_graphs == graphs


class Twice(Weighted):
    def forward(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return (self.fc(x) * dy).sum() + (self.fc(x / 4) * dy / 2).sum()


def test_h8_a_layer_called_twice_keeps_the_larger_amax() -> None:
    state, fn = scoped(MAX, Twice())
    assert fn.sites == ("fc",)
    state = step(state, fn, x=8, dy=16)
    assert column(state, fn) == (56, [0, 0, 0, 8])
    assert column(state, fn, "grad_output") == (57344 / 16, [0, 0, 0, 16])


def test_h9_what_was_released_is_freed() -> None:
    state, kept = scoped(MAX)
    watched = []
    for _ in range(5):
        state, fn = scoped(MAX, state=state)
        state = step(state, fn, x=2)
        watched += [weakref.ref(one) for one in (fn, *fp8_tensors(state, fn).values())]
        state = sf.release(sf.end_autocast(state), fn)
    del fn
    gc.collect()
    assert list(state.fp8) == [kept.owner]
    assert [one() for one in watched] == [None] * 15


def test_h10_another_history_length_keeps_every_column_in_its_place() -> None:
    state, fn = scoped(delayed(4))
    columns = state.fp8[fn.owner].columns
    state = step(state, fn, x=2, w=4, dy=8)
    for length in (7, 3, 1, 16):
        state = step(rescoped(state, delayed(length)), fn, x=2, w=4, dy=8)
        assert state.fp8[fn.owner].columns == columns
        assert state.fp8[fn.owner].amax_history.shape == (length, 3)
        assert [scale(state, fn, role) for role in ("input", "weight", "grad_output")] == [224, 112, 7168]
    assert scale(step(state, fn, x=16), fn) == 28


@pytest.mark.parametrize(
    ("length", "want", "rows"), [(2, 448 / 3, [0, 0.5]), (3, 448 / 3, [0, 3, 0.5]), (6, 448 / 3, [0, 0, 1, 2, 3, 0.5])]
)
def test_h11_a_shorter_history_keeps_the_newest_steps(length: int, want: float, rows: list[float]) -> None:
    state, fn = scoped(delayed(4))
    state = steps(state, fn, 1, 2, 3)
    assert history(state, fn) == [0, 1, 2, 3]
    state = step(rescoped(state, delayed(length)), fn, x=0.5)
    assert scale(state, fn) == pytest.approx(want, rel=1e-7)
    assert history(state, fn) == rows


def test_h12_an_exception_discards_the_step() -> None:
    state, fn = scoped(MAX)
    state = step(state, fn, x=2)

    def interrupted(state: sf.CompilerState, *args: Any) -> tuple[sf.CompilerState, torch.Tensor]:
        state, _ = fn(state, *args)
        raise KeyError("stopped after the forward")

    with unchanged(state), pytest.raises(KeyError, match="stopped"):
        sf.value_and_grad(interrupted)(state, detached(fn), spike(100), spike(100))
    assert column(step(state, fn, x=1), fn) == (224, [0, 0, 2, 1])


def test_h13_there_is_no_reset_and_releasing_one_owner_freezes_no_other() -> None:
    alone, alone_fn = scoped(MAX)
    state, fn = scoped(MAX)
    state, other = scoped(MAX, state=state)
    for amax in (8, 4, 2, 1):
        alone, state = step(alone, alone_fn, x=amax), step(state, fn, x=amax)
        if amax == 4:
            state = sf.release(step(state, other, x=64), other)
    assert_same(fp8_tensors(state, fn), fp8_tensors(alone, alone_fn))
    state = steps(state, fn, 1, 1)
    assert scale(state, fn) == 224


@pytest.mark.parametrize("recipe", [None, MAX], ids=["none", "delayed"])
@pytest.mark.resets_dynamo
def test_h14_a_disabled_scope_opens_inside_one_graph(recipe: Any) -> None:
    state, fn = scoped(recipe, Plain(), enabled=False)
    state, params, graphs = sf.end_autocast(state), detached(fn), []
    x = numbers(0)

    def region(params: Any, x: torch.Tensor) -> torch.Tensor:
        return fn(sf.autocast(state, recipe, enabled=False), params, x)[1]

    y = whole(region, graphs)(params, x)
    torch.testing.assert_close(y, x @ params["fc.weight"].T)
    assert len(graphs) == 1


@pytest.mark.resets_dynamo
def test_h15_a_recipe_is_made_inside_one_graph() -> None:
    state, fn = scoped(MAX, Plain())
    state, x, graphs = sf.end_autocast(state), numbers(0), []

    def region(params: Any, x: torch.Tensor) -> Any:
        inner = sf.autocast(state, sf.DelayedScaling(amax_history_len=4))
        return fn(inner, params, x)[1]

    params = leaves(fn)
    assert_same(whole(region, graphs)(params, x).detach(), region(params, x).detach())
    assert len(graphs) == 1


@pytest.mark.resets_dynamo
def test_h16_state_of_another_model_does_not_meet_a_compiled_region() -> None:
    recipe, x = sf.Float8CurrentScaling(), numbers(0)
    state, other = scoped(MAX)
    state = sf.end_autocast(step(state, other, x=2))
    state, fn = scoped(recipe, Plain(), state=state)
    params, graphs = detached(fn), []
    region = whole(lambda state, params, x: fn(state, params, x), graphs)
    after, y = region(state, params, x)
    lonely, lonely_fn = scoped(recipe, Plain())
    assert_same(y, lonely_fn(lonely, params, x)[1])
    assert_same(fp8_tensors(after, other), fp8_tensors(state, other))
    assert len(graphs) == 1


def test_h17_a_last_call_outside_the_scope_keeps_scales_and_history() -> None:
    state, fn = scoped(MAX)
    state = steps(state, fn, 8, 2)
    before = fp8_tensors(state, fn)
    state, loss = fn(sf.end_autocast(state), detached(fn), spike(3), spike(1))
    torch.testing.assert_close(loss, 3 * fn.params["fc.weight"][0, 0], check_device=False)
    assert_same(fp8_tensors(state, fn), before)
    assert scale(step(sf.autocast(state, MAX), fn, x=1), fn) == 56


@pytest.mark.parametrize("model", [Checkpointed, Weighted], ids=lambda one: one.__name__)
def test_h18_each_microbatch_is_computed_again_with_its_own_scales(model: type[Weighted]) -> None:
    first, fn = scoped(NEWEST, model())
    first = step(first, fn, x=44.8, w=0.3, dy=3)
    second = step(first, fn, x=32, w=0.3, dy=3)
    assert (scale(first, fn), scale(second, fn)) == (pytest.approx(10), 14)
    dy, alone, together = numbers(9), leaves(fn), leaves(fn)
    for state, seed in ((first, 0), (second, 1)):
        fn(state, alone, numbers(seed), dy)[1].backward()
    losses = [fn(state, together, numbers(seed), dy)[1] for state, seed in ((first, 0), (second, 1))]
    (losses[0] + losses[1]).backward()
    assert_same(together["fc.weight"].grad, alone["fc.weight"].grad, rtol=1e-6, atol=1e-6)
    same_scale = leaves(fn)
    for seed in (0, 1):
        fn(first, same_scale, numbers(seed), dy)[1].backward()
    assert not torch.equal(same_scale["fc.weight"].grad, alone["fc.weight"].grad), "the scales would not show"
    assert math.isfinite(sum(one.abs().sum().item() for one in tensors(alone["fc.weight"].grad)))
