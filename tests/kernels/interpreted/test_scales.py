"""Delayed scaling, one step for all columns."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scoped_fn.kernels import _reference as reference
from scoped_fn.kernels._tiles import Tile
from scoped_fn.kernels.gpu.scales import update_scales
from tests.kernels.interpreted.guarded import assert_all_same, guarded
from tests.kernels.interpreted.inputs import arranged, arrangements, batches, numbers, seeds


@given(
    batches,
    st.sampled_from((1, 2, 3, 4, 16, 63, 64, 65, 130)),
    st.sampled_from((0, 1, 5, 32, 33, 70)),
    arrangements,
    st.booleans(),
    st.sampled_from((0, 1, 2, -1, 0.5, 200)),
    seeds,
)
def test_update_scales(batch, length, columns, how, most_recent, margin, seed):
    history = arranged(numbers((batch, length, columns), torch.float32, seed).abs(), how)
    scale = numbers((batch, columns), torch.float32, seed, special=False).abs()
    fp8_max = torch.where(torch.arange(columns) % 2 == 0, 448.0, 57344.0).expand(batch, columns)
    wanted = reference.update_scales(history, scale, fp8_max, most_recent, margin)
    tile = Tile(block_m=32, block_n=32)
    for options in ({}, {"tile": tile}):
        assert_all_same(guarded(update_scales, history, scale, fp8_max, most_recent, margin, **options), wanted)


def steps(amaxes: list[float], length: int, most_recent: bool) -> tuple[list[float], list[float]]:
    """The scale after each amax, for E4M3, and the last history."""
    history, scale, fp8_max = torch.zeros(1, length, 1), torch.ones(1, 1), torch.full((1, 1), 448.0)
    found = []
    for amax in amaxes:
        history[0, 0, 0] = amax
        history, scale = update_scales(history, scale, fp8_max, most_recent, 0)
        found.append(scale.item())
    return found, history.flatten().tolist()


def test_golden_maximum() -> None:
    found, _ = steps([1, 2, 8, 4, 1, 1, 1, 1, 1], 4, False)
    assert found == [448, 224, 56, 56, 56, 56, 112, 448, 448]
    assert steps([1, torch.inf, 2, 2], 4, False)[0] == [448, 448, 224, 224]
    assert steps([2, 0, 0, 4], 3, False) == ([224, 224, 224, 112], [0, 2, 4])
    assert steps([1, 2, 8, 4], 4, False)[1] == [0, 2, 8, 4]


def test_golden_most_recent() -> None:
    assert steps([1, 2, 8, 4, 1], 4, True)[0] == [448, 224, 56, 112, 448]


def column(*values: float) -> Tensor:
    return torch.tensor(values)[None, :, None]


def test_golden_nan_in_the_window() -> None:
    _, scale = update_scales(column(1, torch.nan, 4), torch.ones(1, 1), torch.full((1, 1), 448.0), False, 0)
    assert scale.item() == 112


def test_golden_margin() -> None:
    _, scale = update_scales(column(0.75, 0.0), torch.ones(1, 1), torch.full((1, 1), 57344.0), False, 2)
    assert scale.item() == pytest.approx(19114.666, rel=1e-7)
