"""Laws of delayed scaling and of the scales of the other recipes, over random amaxes."""

from __future__ import annotations

import functools
from typing import Any

import chex
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import scoped_fn as sf
from tests.fp8.linears import (
    Plain,
    arrays,
    column,
    delayed,
    rescoped,
    scale,
    scoped,
    spike,
    step,
)
from tests.helpers import unchanged
from tests.kernels import numpy_oracle as oracle

pytestmark = pytest.mark.usefixtures("one_thread")

ROLES = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}
AMAXES = st.floats(2.0**-60, 2.0**60, width=32)
SOME = st.one_of(AMAXES, st.sampled_from([0.0, float("inf"), float("nan"), 1.0]))
STEPS = st.lists(st.tuples(SOME, SOME, SOME), min_size=1, max_size=6)
RULES = st.sampled_from(["max", "most_recent"])


@functools.cache
def start() -> tuple[sf.CompilerState, sf.CompiledFn]:
    """Compiled once: what an example changes is the update of the scales, and that compiles nothing."""
    return scoped(delayed(4))


def run(recipe: sf.DelayedScaling, amaxes: list[tuple[float, float, float]]) -> sf.CompilerState:
    state, fn = start()
    state = rescoped(state, recipe)
    for three in amaxes:
        state = step(state, fn, *three)
    return state


def assert_same_form(after: sf.CompilerState, before: sf.CompilerState) -> None:
    """Structure, shapes and dtypes are what they were."""
    assert sf.state.tree_structure(after) == sf.state.tree_structure(before)
    chex.assert_trees_all_equal_structs(arrays(after), arrays(before))
    chex.assert_trees_all_equal_shapes_and_dtypes(arrays(after), arrays(before))


@given(STEPS, RULES, st.integers(0, 3))
def test_every_step_is_the_update_of_the_oracle(amaxes: Any, rule: str, margin: int) -> None:
    state, fn = run(delayed(3, amax_compute_algo=rule, margin=margin), amaxes), start()[1]
    history, scales = np.zeros((3, 3), np.float32), np.ones(3, np.float32)
    for three in amaxes:
        history[0] = [0 if np.isnan(one) else one for one in three]
        history, scales = oracle.update_scales(
            history, scales, np.float32(list(ROLES.values())), most_recent=rule == "most_recent", margin=margin
        )
    for index, role in enumerate(ROLES):
        assert column(state, fn, role) == (scales[index], history[:, index].tolist())


@given(STEPS, st.tuples(SOME, SOME, SOME))
def test_a_an_update_is_a_pure_function(amaxes: Any, last: tuple[float, float, float]) -> None:
    before, fn = run(delayed(4), amaxes), start()[1]
    params, inputs = {"fc.weight": spike(last[1])}, (spike(last[0]), spike(last[2]))
    with unchanged(before):
        staged, _ = sf.value_and_grad(fn, accumulate=True)(before, params, *inputs)
        with unchanged(staged):
            once, twice = sf.update_scales(staged), sf.update_scales(staged)
        whole = step(before, fn, *last)
    for after in (staged, once, whole):
        assert_same_form(after, before)
    chex.assert_trees_all_equal(arrays(once), arrays(twice))
    chex.assert_trees_all_equal(arrays(whole), arrays(once))


class Named(nn.Module):
    """Layers by name, registered and called in a given order."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in order})

    def forward(self, xs: dict[str, torch.Tensor], dys: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(self.layers[name](xs[name]) * dys[name]).sum() for name in self.order]).sum()


@functools.cache
def ordered(order: tuple[str, ...]) -> tuple[sf.CompilerState, sf.CompiledFn]:
    matrices = {name: torch.zeros(4, 4) for name in "abc"}
    return scoped(delayed(4), Named(order), matrices, matrices)


@given(st.permutations("abc"), st.lists(st.lists(SOME, min_size=3, max_size=3), min_size=1, max_size=3))
def test_b_the_order_of_the_modules_does_not_matter(order: list[str], amaxes: list[list[float]]) -> None:
    described = []
    for names in (tuple("abc"), tuple(order)):
        state, fn = ordered(names)
        for three in amaxes:
            matrices = {name: spike(amax, 4, 4) for name, amax in zip("abc", three, strict=True)}
            params = {f"layers.{name}.weight": 2 * matrix for name, matrix in matrices.items()}
            state, _ = sf.value_and_grad(fn)(state, params, matrices, matrices)
        described.append(sf.describe_fp8(state))
    assert described[0] == described[1]
    assert set(described[0]) == {"layers.a", "layers.b", "layers.c"}


@given(STEPS, st.sampled_from(sorted(ROLES)), st.sampled_from([0.0, float("inf")]), AMAXES)
def test_c_an_amax_of_zero_or_infinity_changes_nothing(amaxes: Any, role: str, nothing: float, other: float) -> None:
    before, fn = run(delayed(4), amaxes), start()[1]
    last = [nothing if name == role else other for name in ROLES]
    after = step(before, fn, *last)
    assert_same_form(after, before)
    for name in ROLES:
        if name == role:
            assert column(after, fn, name) == column(before, fn, name)
        else:
            assert column(after, fn, name)[1][-1] == other


@given(STEPS, st.integers(0, 4))
def test_d_what_the_window_has_seen_is_in_range(amaxes: Any, margin: int) -> None:
    state, fn = run(delayed(5, margin=margin), amaxes), start()[1]
    for index, (role, largest) in enumerate(ROLES.items()):
        window = [three[index] for three in amaxes if 0 < three[index] < float("inf")][-5:]
        for amax in window:
            product = np.float32(scale(state, fn, role)) * np.float32(amax)
            assert product <= np.nextafter(np.float32(largest * 2.0**-margin), np.float32(np.inf))


@functools.cache
def swept(recipe: Any) -> tuple[sf.CompilerState, sf.CompiledFn]:
    return scoped(recipe, Plain(32, 32), torch.zeros(1, 32))


def smallest(recipe: Any, amax: float) -> float:
    """The smallest number above zero that the recipe gives back beside `amax`: 2^-9 (E4M3) over the scale.

    Halving amax often enough meets a number that rounds to the code of 2^-9. Weights of 448 times the identity have a
    scale of one.
    """
    state, fn = swept(recipe)
    x = amax * torch.ldexp(torch.ones(1, 32), -torch.arange(32.0))
    _, y = fn(state, {"fc.weight": 448 * torch.eye(32)}, x)
    return (y[y > 0].min().double() / 448).item()


@given(AMAXES)
def test_e_a_power_of_two_is_the_exact_scale_rounded_down(amax: float) -> None:
    exact = 2.0**-9 / smallest(sf.Float8CurrentScaling(), amax)
    power = 2.0**-9 / smallest(sf.Float8CurrentScaling(use_power_2_scales=True), amax)
    assert np.frexp(power)[0] == 0.5
    assert power <= exact * (1 + 1e-6)
    assert exact < 2 * power * (1 + 1e-6)
    assert exact == pytest.approx(448 / amax, rel=1e-6)


@given(AMAXES)
def test_f_the_scale_of_a_block_is_the_smallest_power_that_holds_its_amax(amax: float) -> None:
    inverse = smallest(sf.MXFP8BlockScaling(), amax) * 2.0**9
    assert np.frexp(inverse)[0] == 0.5
    assert amax <= 448 * inverse
    assert amax > 448 * inverse / 2


@given(STEPS, st.integers(0, 8), RULES)
def test_g_a_margin_divides_by_powers_of_two(amaxes: Any, margin: int, rule: str) -> None:
    fn = start()[1]
    without, held = (run(delayed(4, margin=one, amax_compute_algo=rule), amaxes) for one in (0, margin))
    for index, role in enumerate(ROLES):
        moved = any(0 < three[index] < float("inf") for three in amaxes)
        assert scale(held, fn, role) == scale(without, fn, role) * (2.0**-margin if moved else 1)
        assert column(held, fn, role)[1] == column(without, fn, role)[1]
