"""The golden vectors of delayed scaling, through training steps of a compiled linear function."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import scoped_fn as sf
from tests.fp8.linears import Plain, column, delayed, history, scale, scoped, spike, step, steps
from tests.kernels import golden
from tests.kernels.checks import assert_arrays_equal

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_OF_4 = [448, 224, 56, 56, 56, 56, 112, 448, 448]


def _cases() -> Iterator[golden.Update]:
    """Each vector that steps can make; those of E4M3 once more for E5M2, whose range is 128 times as wide."""
    for case in golden.UPDATES:
        if any(case.history):
            continue  # a NaN in the history to begin with
        yield case
        if case.format == "e4m3" and len(case.amaxes) > 1:
            yield case._replace(format="e5m2", scales=[128 * one for one in case.scales])


@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_scales_follow_the_vectors(case: golden.Update) -> None:
    recipe = delayed(len(case.history), amax_compute_algo=case.algorithm, margin=case.margin)
    start, fn = scoped(recipe)
    for role in ("input", "weight") if case.format == "e4m3" else ("grad_output",):
        state, scales = start, []
        for amax in case.amaxes:
            state = steps(state, fn, amax, role=role)
            scales.append(scale(state, fn, role))
        assert_arrays_equal(np.float32(scales), np.float32(case.scales), f"scales of {role}")
        assert case.final is None or history(state, fn, role) == case.final


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_the_history_runs_from_the_oldest_to_the_newest_after_the_staging_row(role: str) -> None:
    state, fn = scoped(delayed(4))
    for done, row in enumerate(([0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 8], [0, 2, 8, 4])):
        state = steps(state, fn, (1, 2, 8, 4)[done], role=role)
        assert history(state, fn, role) == row
    described = sf.describe_fp8(state)["fc"][role]
    factor = 128 if role == "grad_output" else 1
    assert described == {"history": [4, 8, 2, 0], "scale": 56 * factor}


def test_constant_tensors_of_four_steps() -> None:
    """All three roles at once, margin 2, as the public suite of TransformerEngine has it."""
    state, fn = scoped(delayed(31, margin=2))
    want = {
        "input": (0.25, [448, 89.6, 49.777779, 34.46154]),
        "weight": (0.5, [224, 74.666664, 44.8, 32]),
        "grad_output": (0.75, [19114.666, 8192, 5213.0908, 3822.9333]),
    }
    for done in range(4):
        x, w, dy = (torch.full((16, 16), done + offset) for offset, _ in want.values())
        state, _ = sf.value_and_grad(fn)(state, {"fc.weight": w}, x, dy)
        for role, (offset, scales) in want.items():
            assert np.float32(scale(state, fn, role)) == np.float32(scales[done])
            past = [index + offset for index in range(done + 1)]
            assert history(state, fn, role) == [0.0] * (31 - len(past)) + past


@pytest.mark.parametrize(("form", "largest"), [(sf.Format.HYBRID, 57344.0), (sf.Format.E4M3, 448.0)], ids=str)
def test_the_format_says_the_range_of_gradients(form: sf.Format, largest: float) -> None:
    state, fn = scoped(delayed(fp8_format=form))
    state = step(state, fn, x=2, w=4, dy=8)
    assert [scale(state, fn, role) for role in ("input", "weight", "grad_output")] == [224, 112, largest / 8]


@pytest.mark.parametrize("recipe", [sf.DelayedScaling, sf.Float8CurrentScaling], ids=lambda one: one.__name__)
def test_e5m2_alone_is_refused(recipe: type) -> None:
    with pytest.raises(sf.SpecError, match="E5M2"):
        recipe(fp8_format=sf.Format.E5M2)


def largest_of(past: torch.Tensor) -> torch.Tensor:
    return past.amax(0)


def doubled(amax: torch.Tensor, old: torch.Tensor, largest: torch.Tensor, recipe: sf.DelayedScaling) -> torch.Tensor:
    assert recipe.amax_history_len == 4
    return torch.where(amax > 0, old * 2, old)


def test_an_own_rule_for_the_amax() -> None:
    state, fn = scoped(delayed(4, amax_compute_algo=largest_of))
    scales = []
    for amax in (1, 2, 8, 4, 1, 1, 1, 1, 1):
        state = step(state, fn, x=amax)
        scales.append(scale(state, fn))
    assert scales == MAX_OF_4


def test_an_own_rule_for_the_scale_leaves_columns_without_amax() -> None:
    state, fn = scoped(delayed(4, scaling_factor_compute_algo=doubled))
    for done in range(3):
        state = step(state, fn, w=0)
        assert scale(state, fn) == 2.0 ** (done + 1)
    assert column(state, fn, "weight") == (1, [0, 0, 0, 0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_step_has_scale_one_and_shows_what_is_not_finite(bad: float) -> None:
    state, fn = scoped(delayed(4), Plain())
    x = spike(-1000)
    x[1, 1] = bad
    state, y = fn(state, {"fc.weight": torch.eye(16).requires_grad_()}, x)
    assert y[0, 0].item() == 448
    assert y[1].isnan().all()
    assert y[2:].eq(0).all()


def test_the_second_step_uses_what_the_first_one_saw() -> None:
    state, fn = scoped(delayed(4), Plain())
    for saturated in (True, False):
        state, y = fn(state, {"fc.weight": torch.eye(16).requires_grad_()}, spike(-1000))
        state = sf.update_scales(state)
        assert y[0, 0].item() == (448 if saturated else pytest.approx(1000, rel=1e-6))
