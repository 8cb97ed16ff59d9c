"""Plain autograd: `backward()`, gradients that accumulate over microbatches, and activation checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf
from tests.fp8.networks import Block, Loss
from tests.fp8.scoped import NETWORKS, Run, example, largest, newest, scales, scoped, trained
from tests.helpers import assert_same, tensors, unchanged

pytestmark = pytest.mark.usefixtures("one_thread")

Call = Callable[..., tuple[sf.CompilerState, Tensor]]


def backward(run: Run, *batch: Tensor, call: Call | None = None) -> tuple[sf.CompilerState, dict[str, Tensor | None]]:
    """The state with all amaxes staged, and the gradients, by `backward()`."""
    leaves = {name: own.detach().clone().requires_grad_() for name, own in run.params.items()}
    state, sinks = sf.watch_gradients(run.state)
    state, loss = (call or run.fn)(state, leaves, *batch)
    loss.backward()
    return sf.stage_gradients(state, sinks), {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize(("name", "kind"), NETWORKS)
def test_backward_gives_what_value_and_grad_gives(name: str, kind: str) -> None:
    run, data = example(kind, name)
    for batch in data:
        with unchanged(run.state):
            state, grads = backward(run, *batch)
        after, _ = trained(run, [batch])
        staged, (_, expected) = sf.value_and_grad(run.fn, accumulate=True)(run.state, run.params, *batch)
        assert_same(grads, expected)
        assert sf.tree_equal(state, staged)
        assert sf.tree_equal(sf.update_scales(state), after.state)
        assert not any(tensor.requires_grad for tensor in tensors(state))
        run = after


def test_gradients_that_nobody_watches_are_the_same() -> None:
    run, data = example()
    run, _ = trained(run, data[:2])
    leaves = {name: own.clone().requires_grad_() for name, own in run.params.items()}
    state, loss = run.fn(run.state, leaves, *data[2])
    grads = torch.autograd.grad(loss, list(leaves.values()))
    staged, expected = backward(run, *data[2])
    assert_same(list(grads), list(expected.values()))
    assert newest(state)["net.0"]["input"] == newest(staged)["net.0"]["input"]
    assert newest(state)["net.0"]["grad_output"] == newest(run.state)["net.0"]["grad_output"]


def test_a_backward_that_never_comes_stages_no_gradient() -> None:
    run, data = example()
    state, sinks = sf.watch_gradients(run.state)
    state, _ = run.fn(state, {name: own.requires_grad_() for name, own in run.params.items()}, *data[0])
    folded = scales(sf.update_scales(sf.stage_gradients(state, sinks)))
    for roles in folded.values():
        assert roles["grad_output"] == {"history": [0.0] * 4, "scale": 1.0}
        assert roles["input"]["scale"] != 1.0


def microbatches() -> tuple[Run, list[tuple[Tensor, Tensor]], dict[str, Any]]:
    """A warm run, two batches, and the largest amaxes of the two on their own."""
    run, data = example()
    run, _ = trained(run, data[:1])
    step = sf.value_and_grad(run.fn, accumulate=True)
    alone = [newest(step(run.state, run.params, *batch)[0]) for batch in data[1:3]]
    for site in alone[0]:
        assert alone[0][site]["grad_output"] != alone[1][site]["grad_output"]
    return run, data[1:3], largest(alone)


def sum_of_losses(run: Run, data: list[tuple[Tensor, Tensor]]) -> Call:
    def total(state: sf.CompilerState, params: Any) -> tuple[sf.CompilerState, Tensor]:
        losses = []
        for batch in data:
            state, loss = run.fn(state, params, *batch)
            losses.append(loss)
        return state, losses[0] + losses[1]

    return total


def accumulated(run: Run, data: list[tuple[Tensor, Tensor]]) -> sf.CompilerState:
    state = run.state
    for batch in data:
        state, _ = sf.value_and_grad(run.fn, accumulate=True)(state, run.params, *batch)
    return state


MICROBATCHES: dict[str, Callable[..., sf.CompilerState]] = {
    "accumulate": accumulated,
    "reversed": lambda run, data: accumulated(run, data[::-1]),
    "one loss": lambda run, data: sf.value_and_grad(sum_of_losses(run, data), accumulate=True)(run.state, run.params)[
        0
    ],
    "backward": lambda run, data: backward(run, call=sum_of_losses(run, data))[0],
}


@pytest.mark.parametrize("way", MICROBATCHES)
def test_microbatches_stage_the_largest_amax_and_use_one_scale(way: str) -> None:
    run, data, expected = microbatches()
    state = MICROBATCHES[way](run, data)
    assert newest(state) == expected
    assert_same(state.fp8[run.fn.owner].scale, run.state.fp8[run.fn.owner].scale)
    for site, roles in scales(sf.update_scales(state)).items():
        for role, one in roles.items():
            assert one["history"][0] == expected[site][role]
            assert one["history"][1] == scales(run.state)[site][role]["history"][0]


def test_the_gradient_of_two_microbatches_is_the_sum() -> None:
    run, data, _ = microbatches()
    _, (loss, total) = sf.value_and_grad(sum_of_losses(run, data))(run.state, run.params)
    alone = [sf.value_and_grad(run.fn)(run.state, run.params, *batch)[1] for batch in data]
    assert_same(loss, alone[0][0] + alone[1][0])
    for name, slope in total.items():
        assert_same(slope, alone[0][1][name] + alone[1][1][name], rtol=1e-6, atol=1e-7)


def test_two_backwards_of_two_calls() -> None:
    run, data, expected = microbatches()
    leaves = {name: own.clone().requires_grad_() for name, own in run.params.items()}
    state = run.state
    for batch in data:
        state, sinks = sf.watch_gradients(state)
        state, loss = run.fn(state, leaves, *batch)
        loss.backward()
        state = sf.stage_gradients(state, sinks)
    assert newest(state) == expected


class Checkpointed(nn.Module):
    """The loss of a block whose activations are computed again in backward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (checkpoint(self.net, x, use_reentrant=False) - y).square().mean()


@pytest.mark.parametrize("kind", ["delayed", "mx"])
def test_a_checkpoint_inside_changes_no_gradient_and_no_state(kind: str) -> None:
    net = Block()
    _, data = example(kind, "block")
    plain, saving = (scoped(model, data[0], kind) for model in (Loss(net), Checkpointed(net)))
    assert set(saving.fn.sites) == set(plain.fn.sites)
    for batch in data:
        plain, losses = trained(plain, [batch])
        saving, others = trained(saving, [batch])
        assert_same(others, losses)
        assert_same(saving.params, plain.params)
        if kind == "delayed":
            assert scales(saving.state) == scales(plain.state)


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_a_checkpoint_around_a_call_changes_no_gradient_and_no_state(kind: str) -> None:
    run, data = example(kind, "block")
    run, _ = trained(run, data[:2])
    again: Call = lambda *args: checkpoint(run.fn, *args, use_reentrant=False)  # noqa: E731
    state, grads = backward(run, *data[2], call=again)
    expected_state, expected = backward(run, *data[2])
    assert_same(grads, expected)
    assert sf.tree_equal(state, expected_state)


def test_checkpoints_that_are_computed_again_in_another_order_use_their_own_scales() -> None:
    run, data = example()
    later, _ = trained(run, data[:2])
    leaves = {name: own.clone().requires_grad_() for name, own in run.params.items()}
    losses = [
        checkpoint(lambda state, batch=data[2]: run.fn(state, leaves, *batch)[1], state, use_reentrant=False)
        for state in (run.state, later.state)
    ]
    (losses[0] + losses[1]).backward()
    for name, leaf in leaves.items():
        alone = [sf.value_and_grad(run.fn)(one.state, run.params, *data[2])[1][1][name] for one in (run, later)]
        assert_same(leaf.grad, alone[0] + alone[1], rtol=1e-6, atol=1e-7)
