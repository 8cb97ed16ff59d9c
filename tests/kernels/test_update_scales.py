"""`update_scales`: the history of amaxes and the next scales, against the oracle, and its laws."""

from __future__ import annotations

import copy

import chex
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoped_fn import kernels
from tests.helpers import assert_disjoint
from tests.kernels import checks, inputs
from tests.kernels import numpy_oracle as oracle

pytestmark = pytest.mark.usefixtures("one_thread")

ALGORITHMS = st.sampled_from(["max", "most_recent"])
MARGINS = st.sampled_from([0, 1, 2, 7, -3, 0.5, 140])
# What an amax is never negative but may be anything else.
ENTRIES = st.one_of(
    st.sampled_from([0.0, 0.0, 1.0, 448.0, 1e-45, 1e-38, 3e-36, 3e38, np.inf, np.nan]),
    st.floats(0, 2.0**100, width=32),
)


@st.composite
def histories(draw: st.DrawFn, entries: st.SearchStrategy[float] = ENTRIES) -> tuple[torch.Tensor, torch.Tensor]:
    """A history (L, n) and scales (n,), in any layout."""
    length, columns = draw(st.integers(1, 6)), draw(st.integers(0, 5))
    numbers = draw(st.lists(entries, min_size=length * columns, max_size=length * columns))
    history = torch.tensor(numbers, dtype=torch.float32).reshape(length, columns)
    scale = torch.tensor(draw(st.lists(st.floats(2.0**-60, 2.0**60, width=32), min_size=columns, max_size=columns)))
    layout = draw(st.sampled_from([one for one in inputs.LAYOUTS if one != "expanded"]))
    return inputs.lay_out(history, layout), inputs.lay_out(scale.float(), layout)


@given(case=histories(), fp8_max=st.sampled_from([448.0, 57344.0]), algorithm=ALGORITHMS, margin=MARGINS)
def test_any_history(case: tuple[torch.Tensor, torch.Tensor], fp8_max: float, algorithm: str, margin: float) -> None:
    checks.check_update_scales(kernels.update_scales, *case, fp8_max=fp8_max, algorithm=algorithm, margin=margin)


@given(case=histories(), algorithm=ALGORITHMS, margin=MARGINS)
def test_a_largest_value_of_each_column(case: tuple[torch.Tensor, torch.Tensor], algorithm: str, margin: float) -> None:
    maxima = torch.tensor([448.0, 57344.0, 448.0, 448.0, 57344.0])[: case[1].numel()]
    checks.check_update_scales(kernels.update_scales, *case, fp8_max=maxima, algorithm=algorithm, margin=margin)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "columns"), [(1, 1), (1, 7), (2, 1), (16, 300), (1024, 3), (1025, 130), (5, 0)])
def test_sizes(length: int, columns: int, algorithm: str) -> None:
    history = inputs.values((length, columns), torch.float32, "rows apart", 7).abs()
    history[:, ::3] *= (torch.rand(length, history[:, ::3].shape[1]) > 0.5).float()
    checks.check_update_scales(
        kernels.update_scales, history, torch.ones(columns), fp8_max=448.0, algorithm=algorithm, margin=1
    )


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_an_expanded_history(algorithm: str) -> None:
    history = torch.tensor([[2.0], [8.0], [0.0]]).expand(3, 4)
    checks.check_update_scales(
        kernels.update_scales, history, torch.ones(1).expand(4), fp8_max=448.0, algorithm=algorithm
    )


@given(case=histories(), algorithm=ALGORITHMS)
def test_it_is_a_pure_function(case: tuple[torch.Tensor, torch.Tensor], algorithm: str) -> None:
    before = copy.deepcopy(case)
    first = kernels.update_scales(*case, fp8_max=448.0, algorithm=algorithm)
    second = kernels.update_scales(*case, fp8_max=448.0, algorithm=algorithm)
    chex.assert_trees_all_equal(*([checks.array(one) for one in result] for result in (first, second)))
    chex.assert_trees_all_equal(*([checks.array(one) for one in tree] for tree in (case, before)))
    assert_disjoint(case, first, second)


@given(case=histories(), seed=inputs.SEEDS, algorithm=ALGORITHMS)
def test_columns_may_be_permuted(case: tuple[torch.Tensor, torch.Tensor], seed: int, algorithm: str) -> None:
    history, scale = case
    order = torch.from_numpy(np.random.default_rng(seed).permutation(scale.numel()))
    maxima = torch.tensor([448.0, 57344.0, 448.0, 448.0, 57344.0])[: scale.numel()]
    plain = kernels.update_scales(history, scale, fp8_max=maxima, algorithm=algorithm)
    moved = kernels.update_scales(history[:, order], scale[order], fp8_max=maxima[order], algorithm=algorithm)
    chex.assert_trees_all_equal([plain[0][:, order].numpy(), plain[1][order].numpy()], [one.numpy() for one in moved])


@pytest.mark.parametrize("staged", [0.0, np.inf, np.nan])
@given(case=histories(), algorithm=ALGORITHMS)
def test_a_column_without_a_finite_amax_keeps_everything(
    staged: float, case: tuple[torch.Tensor, torch.Tensor], algorithm: str
) -> None:
    history, scale = case[0].clone(), case[1]
    history[0] = staged
    new, kept = kernels.update_scales(history, scale, fp8_max=448.0, algorithm=algorithm)
    history[0] = 0
    checks.assert_arrays_equal(checks.array(new), checks.array(history), "amax_history")
    checks.assert_arrays_equal(checks.array(kept), checks.array(scale), "scale")


@given(case=histories(st.floats(2.0**-100, 2.0**100, width=32)), margin=st.integers(-5, 9), algorithm=ALGORITHMS)
def test_what_was_seen_fits_the_format(case: tuple[torch.Tensor, torch.Tensor], margin: int, algorithm: str) -> None:
    history, scale = case
    _, new = kernels.update_scales(history, scale, fp8_max=448.0, algorithm=algorithm, margin=margin)
    amax = history.amax(0) if algorithm == "max" else history[0]
    limit = np.float64(448 * 2.0**-margin)
    assert np.all(amax.double().numpy() * new.double().numpy() <= limit * (1 + 2.0**-23))


@given(case=histories(st.floats(2.0**-20, 2.0**20, width=32)), margin=st.integers(-10, 10), algorithm=ALGORITHMS)
def test_a_margin_scales_by_exactly_a_power_of_two(
    case: tuple[torch.Tensor, torch.Tensor], margin: int, algorithm: str
) -> None:
    plain, shifted = (kernels.update_scales(*case, fp8_max=448.0, algorithm=algorithm, margin=m) for m in (0, margin))
    checks.assert_arrays_equal(checks.array(shifted[0]), checks.array(plain[0]), "amax_history")
    checks.assert_arrays_equal(checks.array(shifted[1]), checks.array(plain[1] * 2.0**-margin), "scale")


@given(seed=inputs.SEEDS, length=st.integers(1, 8), algorithm=ALGORITHMS)
def test_a_long_run_looks_at_exactly_the_last_steps(seed: int, length: int, algorithm: str) -> None:
    amaxes = np.exp2(np.random.default_rng(seed).uniform(-8, 8, 20)).astype(np.float32)
    history, scale = torch.zeros(length, 1), torch.ones(1)
    for step, amax in enumerate(amaxes):
        history = torch.cat([torch.tensor([[amax]]), history[1:]])
        history, scale = kernels.update_scales(history, scale, fp8_max=448.0, algorithm=algorithm)
        window = amaxes[max(0, step + 1 - length) : step + 1]
        expected = window.max() if algorithm == "max" else amax
        assert scale.numpy() == np.float32(448) / expected


def test_defaults_are_the_largest_of_the_window_and_no_margin() -> None:
    history = torch.tensor([[1.0], [8.0]])
    default = kernels.update_scales(history, torch.ones(1), fp8_max=448.0)
    assert default[1].item() == 56
    chex.assert_shape(checks.array(default[0]), (2, 1))
    chex.assert_type([checks.array(one) for one in default], np.float32)


def test_the_scale_never_overflows() -> None:
    history = torch.tensor([[1e-45, 1e-30, 1e-20]])
    _, scale = kernels.update_scales(history, torch.ones(3), fp8_max=57344.0, margin=-20)
    assert scale.tolist() == [float(oracle.FLOAT32_MAX)] * 2 + [float(np.float32(57344 * 2**20) / np.float32(1e-20))]


def test_one_largest_value_for_all_columns() -> None:
    history, scale = torch.rand(3, 4) + 0.5, torch.ones(4)
    number = kernels.update_scales(history, scale, fp8_max=57344.0)
    tensor = kernels.update_scales(history, scale, fp8_max=torch.tensor(57344.0))
    assert all(torch.equal(a, b) for a, b in zip(number, tensor, strict=True))
