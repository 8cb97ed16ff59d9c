"""Schedules after a pause: a run that starts late, and one that was saved and loaded."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.fp8.networks import batches, loss_of
from tests.fp8.scoped import recipe, scales
from tests.helpers import assert_same, fresh
from tests.lifecycles.engines import KINDS, Trainer, batch, sgd, trainer
from tests.lifecycles.graphs import sine_pass

pytestmark = pytest.mark.usefixtures("one_thread")
FP8_DATA = batches("mlp", 8)


def sine_from(step: int, back: int) -> sf.Schedule:
    """A schedule whose entries give different numbers."""
    return sf.Schedule([(0, sf.Passes()), (step, sf.Passes(captured=sine_pass)), (back, sf.Passes())])


def trained(one: Trainer, numbers: range) -> list[torch.Tensor]:
    for number in numbers:
        one.advance(number)
        one.train(batch(number))
    return one.losses[-len(numbers) :]


# 17
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_starts_at_step_100_is_as_uninterrupted(kind: str) -> None:
    whole, resumed = (trainer(kind, schedule=sine_from(50, 105)) for _ in range(2))
    trained(whole, range(100))
    saved = io.BytesIO()
    torch.save(({name: own.detach() for name, own in whole.params.items()}, whole.buffers()), saved)
    saved.seek(0)
    put(resumed, *torch.load(saved))
    expected = trained(whole, range(100, 110))
    assert_same(trained(resumed, range(100, 110)), expected)
    assert_same(resumed.outcome()[1:], whole.outcome()[1:])
    assert resumed.fn.entry == 2
    other = trainer(kind)
    put(other, *torch.load(io.BytesIO(saved.getvalue())))
    assert not torch.equal(trained_without(other, 100), expected[0]), "the entry of step 50 is seen in the numbers"


def trained_without(one: Trainer, number: int) -> torch.Tensor:
    one.train(batch(number))
    return one.losses[-1]


def put(one: Trainer, params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
    """Gives a trainer what another one had."""
    if hasattr(one, "engine"):
        one.engine.load_state_dict({**params, **buffers})
        return
    one.params = fresh({name: own.requires_grad_() for name, own in params.items()})
    one.optimizer = sgd(one.params.values())
    one.world.state = sf.set_buffers(one.world.state, one.fn.owner, buffers)


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[sf.Engine, list[torch.Tensor]]:
    engine = fp8_engine()
    return engine, fp8_steps(engine, range(8))


# 17
@pytest.mark.parametrize("stop", [2, 4, 5])
def test_an_engine_in_fp8_saved_and_loaded_mid_schedule_is_as_uninterrupted(
    stop: int, uninterrupted: tuple[sf.Engine, list[torch.Tensor]]
) -> None:
    whole, losses = uninterrupted
    first, second = fp8_engine(), fp8_engine()
    seen = fp8_steps(first, range(stop))
    second.load_state_dict(torch_saved(first.state_dict()))
    seen += fp8_steps(second, range(stop, 8))
    assert_same(seen, losses)
    assert scales(second.state) == scales(whole.state)
    assert second.fn.entry == whole.fn.entry == 1


def fp8_engine() -> sf.Engine:
    def other(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        gm = sf.copy_graph(gm)
        for node in gm.graph.find_nodes(op="call_function", target=torch._C._nn.gelu):
            node.target = torch.nn.functional.silu
            node.kwargs = {}
        gm.recompile()
        return gm

    torch.manual_seed(0)
    schedule = sf.Schedule([(0, sf.Passes()), (4, sf.Passes(captured=other))])
    return sf.Engine(loss_of("mlp"), FP8_DATA[0], recipe=recipe(), backend="eager", schedule=schedule)


def fp8_steps(engine: sf.Engine, numbers: range) -> list[torch.Tensor]:
    optimizer, losses = sgd(engine.parameters()), []
    for number in numbers:
        engine.advance(number)
        loss = engine(*FP8_DATA[number])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.end_step()
        losses.append(loss.detach())
    return losses


def torch_saved(value: Any) -> Any:
    """The value as it comes back from a file."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)
