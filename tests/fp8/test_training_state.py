"""What a step does to the state: numbers change, nothing else does; fields of the update act without compiling."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scoped_fn as sf
from tests.fp8.networks import batches, loss_of
from tests.fp8.scoped import (
    KINDS,
    Run,
    arrays,
    assert_same_shape_of_state,
    compiled_so_far,
    example,
    recipe,
    rescoped,
    scales,
    scoped,
    trained,
)
from tests.helpers import assert_same, tensors

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_changes_numbers_only(kind: str) -> None:
    run, data = example(kind)
    for batch in data:
        after, _ = trained(run, [batch])
        assert_same_shape_of_state(after.state, run.state)
        run = after
    assert not any(tensor.requires_grad for tensor in tensors(run.state))


def test_only_delayed_scaling_holds_scales() -> None:
    held = {kind: set(example(kind)[0].state.fp8) for kind in KINDS}
    run, _ = example("delayed")
    assert held == {"delayed": {run.fn.owner}, "current": set(), "block": set(), "mx": set()}


def test_the_parts_of_a_first_state() -> None:
    run, _ = example(recipe(amax_history_len=3))
    part = run.state.fp8[run.fn.owner]
    roles = [(site, role) for site in ("net.0", "net.2") for role in ("input", "weight", "grad_output")]
    assert sorted(part.columns) == sorted(roles)
    assert part.scale.tolist() == [1.0] * 6
    assert part.amax_history.tolist() == [[0.0] * 6] * 3
    assert not part.grad_sink.any()
    assert part.grad_sink.shape == (2,)
    assert {leaf.dtype for leaf in (part.scale, part.amax_history, part.grad_sink)} == {torch.float32}
    assert part.recipe == recipe(amax_history_len=3)


def test_staging_and_the_fold() -> None:
    run, data = example(recipe(amax_history_len=3))
    owner = run.fn.owner
    state, _ = sf.value_and_grad(run.fn, accumulate=True)(run.state, run.params, *data[0])
    staged = arrays(state)["fp8"][str(owner)]["amax_history"]
    assert (staged[0] > 0).all()
    assert not staged[1:].any()
    assert_same(state.fp8[owner].scale, run.state.fp8[owner].scale)
    folded = sf.update_scales(state)
    history = folded.fp8[owner].amax_history
    assert not history[:2].any()
    assert_same(history[2], state.fp8[owner].amax_history[0])
    largest = torch.tensor([57344.0 if role == "grad_output" else 448.0 for _, role in folded.fp8[owner].columns])
    assert_same(folded.fp8[owner].scale, largest / history[2])
    assert sf.tree_equal(folded, sf.value_and_grad(run.fn)(run.state, run.params, *data[0])[0])
    assert sf.tree_equal(folded, sf.update_scales(state, owner))


def test_another_margin_acts_on_the_next_step_and_compiles_nothing() -> None:
    run, data = example(recipe(margin=0))
    run, _ = trained(run, data[:2])
    before, kept = compiled_so_far(run.fn), copy.deepcopy(scales(run.state))
    plain, _ = trained(run, data[2:3])
    other, _ = trained(Run(rescoped(run.state, recipe(margin=3)), run.fn, run.params), data[2:3])
    assert compiled_so_far(run.fn) == before
    assert scales(run.state) == kept
    for site, roles in scales(plain.state).items():
        for role, one in roles.items():
            assert scales(other.state)[site][role] == {"history": one["history"], "scale": one["scale"] / 8}


def test_another_algorithm_acts_on_the_next_step_and_compiles_nothing() -> None:
    run, data = example(recipe())
    run, _ = trained(run, data[:3])
    before = compiled_so_far(run.fn)
    recent = recipe(amax_compute_algo="most_recent")
    other, _ = trained(Run(rescoped(run.state, recent), run.fn, run.params), data[3:4])
    assert compiled_so_far(run.fn) == before
    for roles in scales(other.state).values():
        for role, one in roles.items():
            largest = 57344.0 if role == "grad_output" else 448.0
            assert one["scale"] == (torch.tensor(largest) / torch.tensor(one["history"][0])).item()


def amax_run(length: int, amaxes: list[float], run: Run | None = None) -> Run:
    """A linear layer that saw inputs of these amaxes, one a step, with a history of this length."""
    x = torch.ones(2, 3)
    of = recipe(amax_history_len=length)
    if run is None:
        run = scoped(lambda w, x: (x @ w).sum(), (torch.ones(3, 2), x), of)
    state = rescoped(run.state, of)
    for amax in amaxes:
        state, _ = sf.value_and_grad(run.fn)(state, torch.ones(3, 2), amax * x)
    return Run(state, run.fn, {})


def inputs_of(run: Run) -> dict[str, Any]:
    (roles,) = scales(run.state).values()
    return roles["input"]


@pytest.mark.parametrize(
    ("length", "history", "scale", "next_scale"),
    [
        (2, [1.0, 0.0], 448 / 2, 448.0),
        (3, [1.0, 2.0, 0.0], 448 / 8, 448 / 2),
        (4, [1.0, 2.0, 8.0, 0.0], 448 / 8, 448 / 8),
        (6, [1.0, 2.0, 8.0, 4.0, 0.0, 0.0], 448 / 8, 448 / 8),
    ],
)
def test_a_history_of_another_length_keeps_the_newest_entries(
    length: int, history: list[float], scale: float, next_scale: float
) -> None:
    run = amax_run(4, [4.0, 8.0, 2.0])
    assert inputs_of(run) == {"history": [2.0, 8.0, 4.0, 0.0], "scale": 56.0}
    before = compiled_so_far(run.fn)
    run = amax_run(length, [1.0], run)
    assert inputs_of(run) == {"history": history, "scale": scale}
    assert inputs_of(amax_run(length, [1.0], run))["scale"] == next_scale
    assert compiled_so_far(run.fn) == before


class Gate(nn.Module):
    """Two layers, one of which may stay out of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = self.a(x)
        return (self.b(x) if use else x).square().sum()


def test_a_layer_that_did_not_run_keeps_its_scales() -> None:
    x = torch.randn(3, 4)
    run = scoped(Gate(), (x, True))
    state, _ = sf.value_and_grad(run.fn)(run.state, run.params, x, True)
    after, _ = sf.value_and_grad(run.fn)(state, run.params, 2 * x, False)
    assert scales(after)["b"] == scales(state)["b"]
    assert scales(after)["a"]["input"]["history"][0] == 2 * scales(state)["a"]["input"]["history"][0]


def test_an_exception_leaves_the_state_usable() -> None:
    run, data = example()
    expected = trained(run, data)[1]
    with pytest.raises(sf.SpecError):
        sf.value_and_grad(run.fn)(run.state, {}, *data[0])
    assert_same(trained(run, data)[1], expected)


def test_leaves_survive_a_round_trip_through_optree() -> None:
    run, data = example()
    run, _ = trained(run, data[:2])
    again = sf.state.tree_unflatten(sf.state.tree_structure(run.state), sf.state.tree_leaves(run.state))
    assert sf.tree_equal(again, run.state)
    assert_same(trained(Run(again, run.fn, run.params), data)[1], trained(run, data)[1])


def test_scales_of_a_bfloat16_model_are_float32() -> None:
    model, data = loss_of("mlp", torch.bfloat16), batches("mlp", 1, torch.bfloat16)
    run, _ = trained(scoped(model, data[0]), data)
    assert {str(one.dtype) for one in arrays(run.state)["fp8"][str(run.fn.owner)].values()} == {"float32"}
