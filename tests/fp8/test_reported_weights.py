"""Issues about weights that are quantized once and used for several calls, and about weights that are frozen."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.fp8.linears import (
    SIZE,
    Plain,
    column,
    delayed,
    detached,
    fp8_tensors,
    leaves,
    numbers,
    scale,
    scoped,
    spike,
    step,
)
from tests.helpers import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = delayed(4)
STATELESS = [sf.Float8CurrentScaling(), sf.Float8BlockScaling(), sf.MXFP8BlockScaling()]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def alive_in_fp8() -> int:
    """How many FP8 tensors Python still holds."""
    gc.collect()
    held = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype in FP8]
    return sum(one.device.type != "meta" for one in held)  # graphs keep shapes, without memory


@pytest.mark.parametrize("length", [1, 3, 16])
def test_1047_cached_weights_give_what_fresh_ones_give(length: int) -> None:
    state, fn = scoped(delayed(length))
    params, train = detached(fn), sf.value_and_grad(fn, accumulate=True)
    for seed in range(2):
        cached, weights = sf.quantize_weights(state, fn, params)
        for microbatch in range(4):
            inputs = numbers(10 * seed + microbatch), numbers(100 + microbatch)
            cached, with_cached = train(cached, weights, *inputs)
            state, with_fresh = train(state, params, *inputs)
            assert_same(with_cached, with_fresh)
        cached, state = sf.update_scales(cached), sf.update_scales(state)
        assert_same(fp8_tensors(cached, fn), fp8_tensors(state, fn))
        params = {name: 3 * one for name, one in params.items()}


@pytest.mark.parametrize("recipe", STATELESS, ids=str)
def test_1047_cached_weights_of_recipes_without_state(recipe: Any) -> None:
    state, fn = scoped(recipe)
    state, weights = sf.quantize_weights(state, fn, detached(fn))
    assert list(weights) == ["fc.weight"]
    train, inputs = sf.value_and_grad(fn), (numbers(0), numbers(1))
    assert_same(train(state, weights, *inputs)[1], train(state, detached(fn), *inputs)[1])


def test_3051_other_cached_weights_act_at_once_and_compile_nothing() -> None:
    state, fn = scoped(RECIPE, Plain())
    params, outputs, graphs = detached(fn), [], []
    for factor in (1, 2, 1):
        _, weights = sf.quantize_weights(state, fn, {name: factor * one for name, one in params.items()})
        outputs.append(fn(state, weights, numbers(0))[1])
        graphs.append(fn.cache_info().compiled_graphs)
    assert_same(outputs[2], outputs[0])
    assert (outputs[1] - 2 * outputs[0]).norm() < 0.05 * outputs[1].norm()
    assert graphs[0] == graphs[2]


def test_3298_a_call_with_cached_weights_caches_nothing_for_the_next() -> None:
    state, fn = scoped(sf.Float8CurrentScaling(), Plain())
    params, x = detached(fn), numbers(0)
    state, weights = sf.quantize_weights(state, fn, params)
    _, cached = fn(state, weights, x)
    for factor in (1, 2, 4):
        _, fresh = fn(state, {name: factor * one for name, one in params.items()}, x)
        assert_same(fresh, factor * cached)


def test_3220_cached_weights_stay_when_the_parameter_changes_or_gets_other_memory() -> None:
    model = Plain()
    state, fn = scoped(RECIPE, model)
    state, weights = sf.quantize_weights(state, fn, dict(model.named_parameters()))
    _, before = fn(state, weights, numbers(0))
    with torch.no_grad():
        model.fc.weight.mul_(5)
    model.fc.weight.data = torch.full((SIZE, SIZE), 7.0)
    assert_same(fn(state, weights, numbers(0))[1], before)


def test_2119_3246_and_3271_a_step_with_cached_weights_leaves_the_scale_of_the_weights() -> None:
    state, fn = scoped(RECIPE)
    state, weights = sf.quantize_weights(state, fn, {"fc.weight": spike(2)})
    train = sf.value_and_grad(fn)
    for done in (1, 2, 3):
        state, _ = train(state, weights, spike(4), spike(1))
        assert column(state, fn, "weight") == (224, [0, 0, 0, 2])
        assert column(state, fn) == (112, [0] * (4 - done) + [4] * done)


def test_2681_and_2717_nothing_in_fp8_is_kept_after_a_step() -> None:
    state, fn = scoped(RECIPE)
    before = alive_in_fp8()
    state, weights = sf.quantize_weights(state, fn, detached(fn))
    assert alive_in_fp8() > before
    state, results = sf.value_and_grad(fn)(state, weights, numbers(0), numbers(1))
    state, loss = fn(state, leaves(fn), numbers(0), numbers(1))
    loss.backward()
    del weights, loss
    assert alive_in_fp8() == before
    assert results[1]["fc.weight"].dtype == torch.float32


@pytest.mark.parametrize("recipe", [RECIPE, *STATELESS], ids=str)
def test_1972_and_1593_weights_cached_for_evaluation_serve_a_training_step(recipe: Any) -> None:
    state, fn = scoped(recipe)
    x, dy = numbers(0).requires_grad_(), numbers(1)
    with torch.no_grad():
        state, weights = sf.quantize_weights(state, fn, detached(fn))
        _, evaluated = fn(state, weights, x, dy)
    results = []
    for params in (weights, detached(fn)):
        _, loss = fn(state, params, x, dy)
        results.append((loss.detach(), torch.autograd.grad(loss, x)))
    assert_same(results[0], results[1])
    assert_same(evaluated, results[0][0])


def matmuls_in_backward(y: torch.Tensor, dy: torch.Tensor) -> int:
    """How many products of FP8 matrices the backward launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward(dy)
    names = [event.name for event in profile.events() if event.name.startswith("scoped_fn::")]
    return sum("mm" in name for name in names)


def test_1693_a_frozen_weight_has_no_product_for_its_gradient() -> None:
    state, fn = scoped(sf.Float8CurrentScaling(), Plain(), numbers(0).requires_grad_())
    counts = []
    for frozen in (False, True):
        x, params = numbers(0).requires_grad_(), {"fc.weight": numbers(1).requires_grad_(not frozen)}
        _, y = fn(state, params, x)
        counts.append(matmuls_in_backward(y, numbers(2)))
        assert x.grad is not None
        assert (params["fc.weight"].grad is None) == frozen
    assert counts == [2, 1]


@pytest.mark.parametrize("recipe", [RECIPE, *STATELESS], ids=str)
def test_567_and_771_other_weights_are_near_their_fp8_values_in_spite_of_old_scales(recipe: Any) -> None:
    state, fn = scoped(recipe)
    state = step(state, fn, w=1e-3)
    loaded = {"fc.weight": 8 * numbers(0).bfloat16().float()}
    if recipe == RECIPE:
        assert scale(state, fn, "weight") == pytest.approx(448e3)
        state, _ = sf.quantize_weights(state, fn, loaded)
        state = sf.update_scales(state)
    state, weights = sf.quantize_weights(state, fn, loaded)
    rows = [fn(state, weights, torch.eye(SIZE), spike(-1).roll(index, 1))[1] for index in range(SIZE)]
    exact = loaded["fc.weight"][:, 0]
    torch.testing.assert_close(torch.stack(rows), exact, rtol=2.0**-4, atol=exact.abs().max().item() * 2.0**-14)
