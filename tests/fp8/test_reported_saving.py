"""Issues about saving and loading: fixed shapes, no pickle, a resumed run is the run that was never stopped."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.fp8.linears import Plain, Weighted, delayed, fp8_tensors, numbers, scoped, step, steps
from tests.helpers import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = delayed(4)
NAMES = {"fp8.scale", "fp8.amax_history"}


def engine(length: int = 4, seed: int = 0) -> sf.Engine:
    torch.manual_seed(seed)
    return sf.Engine(Plain(bias=True), (numbers(0),), recipe=delayed(length), backend="eager")


def optimizer(one: sf.Engine) -> torch.optim.Optimizer:
    return torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)


def train(one: sf.Engine, moves: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        moves.zero_grad()
        loss = (one(2.0**seed * numbers(seed)) - numbers(50)).square().mean() / 4.0**seed
        loss.backward()
        moves.step()
        one.end_step()
        losses.append(loss.item())
    return losses


def saved(tree: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def test_1860_saved_tensors_have_the_same_shapes_before_and_after_the_first_step() -> None:
    one = engine(8)
    shapes = [{name: value.shape for name, value in one.state_dict().items()}]
    train(one, optimizer(one), range(1))
    shapes.append({name: value.shape for name, value in one.state_dict().items()})
    assert shapes[0] == shapes[1]
    assert shapes[0]["fp8.scale"] == (3,)
    assert shapes[0]["fp8.amax_history"] == (8, 3)


def test_1623_a_checkpoint_of_the_model_alone_is_told_apart_and_leaves_the_fp8_state() -> None:
    one, plain = engine(), Plain(bias=True)
    train(one, optimizer(one), range(2))
    before = {name: value.clone() for name, value in one.state_dict().items() if name.startswith("fp8.")}
    assert set(before) >= NAMES
    assert set(one.state_dict()) == set(plain.state_dict()) | set(before)
    with pytest.raises(RuntimeError, match="fp8.scale"):
        one.load_state_dict(plain.state_dict())
    one.load_state_dict(plain.state_dict(), strict=False)
    assert_same({name: one.state_dict()[name] for name in before}, before)
    assert_same(one.state_dict()["fc.weight"], plain.fc.weight.detach())


def test_1623_a_history_of_another_length_is_refused_before_anything_is_loaded() -> None:
    one, longer = engine(4), engine(6, seed=1)
    train(one, optimizer(one), range(3))
    before = {name: value.clone() for name, value in longer.state_dict().items()}
    with pytest.raises(sf.SpecError, match="amax_history_len=4"):
        longer.load_state_dict(one.state_dict())
    assert_same(dict(longer.state_dict()), before)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_982_a_part_of_the_fp8_state_is_refused(name: str) -> None:
    one = engine()
    contents = one.state_dict()
    del contents[name]
    with pytest.raises(sf.SpecError, match=name):
        one.load_state_dict(contents)


def test_982_a_resumed_run_is_the_run_that_was_never_stopped() -> None:
    straight = engine()
    expected = train(straight, optimizer(straight), range(6))
    first = engine()
    moves = optimizer(first)
    losses = train(first, moves, range(3))
    data = saved({"engine": first.state_dict(), "optimizer": moves.state_dict()})
    second = engine(seed=1)
    moves = optimizer(second)
    contents = loaded(data)
    second.load_state_dict(contents["engine"])
    moves.load_state_dict(contents["optimizer"])
    losses += train(second, moves, range(3, 6))
    assert losses == expected
    assert_same(second.state_dict(), straight.state_dict())


def test_304_what_was_loaded_is_saved_again_without_a_forward() -> None:
    one, other = engine(), engine(seed=1)
    train(one, optimizer(one), range(2))
    other.load_state_dict(loaded(saved(one.state_dict())))
    assert_same(dict(other.state_dict()), dict(one.state_dict()))
    assert not torch.equal(other.state_dict()["fp8.scale"], torch.ones(3))
    assert sf.describe_fp8(other.state) == sf.describe_fp8(one.state)


def test_231_and_63_a_checkpoint_does_not_grow() -> None:
    one = engine(16)
    moves = optimizer(one)
    train(one, moves, range(1))
    size = len(saved(one.state_dict()))
    train(one, moves, range(1, 40))
    assert len(saved(one.state_dict())) == size


def test_3123_nothing_in_a_checkpoint_needs_pickle() -> None:
    one = engine()
    train(one, optimizer(one), range(2))
    assert_same(dict(loaded(saved(one.state_dict()))), dict(one.state_dict()))
    state, fn = scoped(RECIPE)
    state = steps(state, fn, 8, 2)
    assert_same(loaded(saved(fp8_tensors(state, fn))), fp8_tensors(state, fn))


def test_an_evaluation_before_saving_loses_nothing() -> None:
    one = engine()
    train(one, optimizer(one), range(2))
    before = {name: value.clone() for name, value in one.state_dict().items()}
    one.eval()
    with torch.no_grad():
        one(1000 * numbers(7))
    assert_same(dict(one.state_dict()), before)


@pytest.mark.parametrize("recipe", [RECIPE, sf.MXFP8BlockScaling()], ids=str)
def test_a_whole_state_goes_through_pickle(recipe: Any) -> None:
    state, fn = scoped(recipe, Weighted())
    state = step(state, fn, x=8)
    twin = pickle.loads(pickle.dumps(state))
    assert sf.tree_equal(twin, state)
    assert twin.autocast == state.autocast
    assert sf.tree_equal(step(twin, fn, x=2), step(state, fn, x=2))


def test_recipes_come_out_of_pickle_equal() -> None:
    recipes = [
        RECIPE,
        sf.Float8CurrentScaling(use_power_2_scales=True),
        sf.Float8BlockScaling(),
        sf.NVFP4BlockScaling(),
    ]
    for recipe in recipes:
        twin = pickle.loads(pickle.dumps(recipe))
        assert twin == recipe
        assert hash(twin) == hash(recipe)
