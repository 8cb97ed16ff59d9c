"""Training in FP8 through a compiled function is training with swapped layers in eager torch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.fp8.networks import batches, loss_of
from tests.fp8.reference import Reference
from tests.fp8.scoped import KINDS, Run, compiled_so_far, recipe, scales, scoped, trained
from tests.helpers import assert_same, unchanged

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS: dict[str, tuple[str, torch.dtype, bool]] = {
    "mlp": ("mlp", torch.float32, True),
    "mlp in bfloat16 without bias": ("mlp", torch.bfloat16, False),
    "block without bias": ("block", torch.float32, False),
    "block in bfloat16": ("block", torch.bfloat16, True),
    "mlp in float16": ("mlp", torch.float16, True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", MODELS)
def test_twenty_steps_equal_the_reference_to_the_last_bit(which: str, kind: str) -> None:
    name, dtype, bias = MODELS[which]
    model, data = loss_of(name, dtype, bias), batches(name, 20, dtype)
    run, reference = scoped(model, data[0], kind), Reference(model, kind)
    for number, batch in enumerate(data):
        run, (loss,) = trained(run, [batch])
        assert_same(loss, reference.step(*batch), what=f"loss of step {number}")
        if kind == "delayed":
            assert scales(run.state) == reference.describe(), f"step {number}"
    assert_same(run.params, {key: own.detach() for key, own in reference.model.named_parameters()}, what="parameter")
    assert torch.isfinite(loss)


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one step": ({"amax_history_len": 1}, {"length": 1}),
    "margin": ({"margin": 2}, {"margin": 2}),
    "most recent": ({"amax_compute_algo": "most_recent"}, {"algorithm": "most_recent"}),
    "long": ({"amax_history_len": 1024}, {"length": 1024}),
}


@pytest.mark.parametrize("which", FIELDS)
def test_the_fields_of_delayed_scaling(which: str) -> None:
    ours, theirs = FIELDS[which]
    model, data = loss_of("mlp"), batches("mlp", 8)
    run, reference = scoped(model, data[0], recipe("delayed", **ours)), Reference(model, **theirs)
    run, losses = trained(run, data)
    assert_same(losses, [reference.step(*batch) for batch in data], what="loss")
    assert scales(run.state) == reference.describe()


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_skipped_layers_are_those_of_the_reference(kind: str) -> None:
    model, data = loss_of("block"), batches("block", 5)
    run, losses = trained(scoped(model, data[0], kind, skip=("qkv", "net.down")), data)
    reference = Reference(model, kind, skip=("net.qkv", "net.down"))
    assert_same(losses, [reference.step(*batch) for batch in data], what="loss")
    assert set(run.fn.sites) == {"net.out", "net.up"}


def test_inductor_trains_within_rounding() -> None:
    model, data = loss_of("block"), batches("block", 5)
    run, losses = trained(scoped(model, data[0], "delayed", backend="inductor"), data)
    reference = Reference(model)
    expected = [reference.step(*batch) for batch in data]
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=2e-3, atol=2e-3)
    described = reference.describe()
    for site, roles in scales(run.state).items():
        for role, one in roles.items():
            assert one["scale"] == pytest.approx(described[site][role]["scale"], rel=2e-2), (site, role)


def test_interleaved_functions_in_one_state_give_the_bits_that_each_gives_alone() -> None:
    data = {name: batches(name, 6) for name in ("mlp", "block")}
    models = {name: loss_of(name) for name in data}
    alone = {name: trained(scoped(models[name], data[name][0]), data[name]) for name in data}
    first = scoped(models["mlp"], data["mlp"][0])
    runs = {"mlp": first, "block": scoped(models["block"], data["block"][0], state=sf.end_autocast(first.state))}
    state = runs["block"].state
    losses: dict[str, list[torch.Tensor]] = {"mlp": [], "block": []}
    for number in range(6):
        for name, run in runs.items():
            runs[name], more = trained(Run(state, run.fn, run.params), [data[name][number]])
            losses[name] += more
            state = runs[name].state
    for name, (run, expected) in alone.items():
        assert_same(losses[name], expected, what=name)
        assert scales(state, runs[name].fn.owner) == scales(run.state)


def test_a_run_is_a_function_of_its_first_state() -> None:
    data = batches("block", 6)
    run = scoped(loss_of("block"), data[0])
    with unchanged(run.state, run.params):
        first, losses = trained(run, data)
    again, more = trained(run, data)
    assert_same(losses, more, what="loss")
    assert_same(first.params, again.params, what="parameter")
    assert sf.tree_equal(first.state, again.state)
    assert not sf.tree_equal(first.state, run.state)


def test_fifty_steps_compile_nothing_after_the_first() -> None:
    data = batches("mlp", 50)
    run, _ = trained(scoped(loss_of("mlp"), data[0]), data[:1])
    before = run.fn.cache_info()
    run, _ = trained(run, data[1:])
    assert run.fn.cache_info() == before._replace(compiled_calls=before.compiled_calls + 49)
    assert before.eager_calls == 0


@pytest.mark.parametrize("of", ["delayed", "current"])
def test_a_step_is_one_graph_for_each_direction(of: str) -> None:
    data = batches("mlp", 1)
    run = scoped(loss_of("mlp"), data[0], of)
    assert compiled_so_far(run.fn) == (1, 2, 0)
    leaves = {name: own.requires_grad_() for name, own in run.params.items()}
    _, loss = run.fn(run.state, leaves, *data[0])
    loss.backward()
    assert compiled_so_far(run.fn) == (1, 2, 0)
