"""`Engine`: training with parameters and buffers of the model itself, by any optimiser of torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import scoped_fn as sf
from tests.fp8.networks import batches, loss_of
from tests.fp8.reference import Reference
from tests.fp8.scoped import KINDS, plain, recipe, scales
from tests.helpers import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(name: str, kind: str = "delayed") -> tuple[sf.Engine, list[tuple[Tensor, Tensor]]]:
    data = batches(name, 6)
    return sf.Engine(loss_of(name), data[0], recipe=recipe(kind), backend="eager"), data


def stepped(engine: sf.Engine, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = engine(*batch)
    loss.backward()
    optimizer.step()
    engine.end_step()
    return loss.detach()


def sgd(engine: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(engine.parameters(), lr=0.05, foreach=False)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_trains_like_the_reference(kind: str) -> None:
    model, data = loss_of("block"), batches("block", 6)
    reference = Reference(model, kind)
    twin = sgd(reference.model)
    engine = sf.Engine(model, data[0], recipe=recipe(kind), backend="eager")
    optimizer = sgd(engine)
    for batch in data:
        twin.zero_grad()
        expected = reference.model(*batch)
        expected.backward()
        twin.step()
        reference.end_step()
        assert_same(stepped(engine, optimizer, batch), expected.detach())
        if kind == "delayed":
            assert plain(sf.describe_fp8(engine.state)) == reference.describe()
    assert_same([own.detach() for own in model.parameters()], [own.detach() for own in reference.model.parameters()])


def test_two_engines_interleaved_give_the_bits_that_each_gives_alone() -> None:
    def alone(name: str) -> tuple[list[Tensor], object]:
        torch.manual_seed(0)
        engine, data = engine_of(name)
        optimizer = sgd(engine)
        return [stepped(engine, optimizer, batch) for batch in data], scales(engine.state)

    expected = {name: alone(name) for name in ("mlp", "block")}
    engines = {}
    for name in expected:
        torch.manual_seed(0)
        engine, data = engine_of(name)
        engines[name] = (engine, sgd(engine), data)
    losses: dict[str, list[Tensor]] = {name: [] for name in engines}
    for number in range(6):
        for name, (engine, optimizer, data) in engines.items():
            losses[name].append(stepped(engine, optimizer, data[number]))
    for name, (values, last) in expected.items():
        assert_same(losses[name], values)
        assert scales(engines[name][0].state) == last


def test_microbatches_and_evaluation_before_the_end_of_a_step() -> None:
    engine, data = engine_of("mlp")
    optimizer = sgd(engine)
    stepped(engine, optimizer, data[0])
    before = scales(engine.state)
    losses = [engine(*batch) for batch in data[1:3]]
    sum(losses).backward()
    engine.eval()
    with torch.no_grad():
        engine(*data[3])
    engine.train()
    engine.end_step()
    for site, roles in scales(engine.state).items():
        for role, one in roles.items():
            assert one["history"][1] == before[site][role]["history"][0], (site, role)
            assert one["history"][0] > 0
    largest = max(batch[0].abs().max().item() for batch in data[1:3])
    assert scales(engine.state)["net.0"]["input"]["history"][0] == largest


@pytest.mark.parametrize("steps", [0, 3])
def test_a_saved_engine_goes_on_with_the_same_bits(steps: int) -> None:
    engine, data = engine_of("mlp")
    optimizer = sgd(engine)
    for batch in data[:steps]:
        stepped(engine, optimizer, batch)
    entries = copy.deepcopy(engine.state_dict())
    names = {*loss_of("mlp").state_dict(), "fp8.scale", "fp8.amax_history", "fp8.columns"}
    assert set(entries) == names
    other, _ = engine_of("mlp")
    assert {key: one.shape for key, one in other.state_dict().items()} == {k: one.shape for k, one in entries.items()}
    other.load_state_dict(entries)
    rest = data[steps:]
    second = sgd(other)
    assert_same([stepped(other, second, batch) for batch in rest], [stepped(engine, optimizer, one) for one in rest])
    assert scales(other.state) == scales(engine.state)


def test_the_parameters_are_the_models_own_and_buffers_are_kept_up_to_date() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(6, 8)
    engine = sf.Engine(model, (x,), recipe=recipe(), backend="eager")
    assert {id(one) for one in engine.parameters()} == {id(one) for one in model.parameters()}
    assert list(engine.state_dict())[: len(model.state_dict())] == list(model.state_dict())
    before = model[1].running_mean.clone()
    engine(x).sum().backward()
    assert model[1].num_batches_tracked == 1
    assert not torch.equal(model[1].running_mean, before)
    kept = model[1].running_mean.clone()
    engine.eval()
    assert not torch.equal(engine(x), engine.train()(x))
    assert model[1].num_batches_tracked == 2
    assert not torch.equal(model[1].running_mean, kept)
