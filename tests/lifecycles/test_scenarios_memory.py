"""Low precision parameters and activation checkpoints: what is alive, in which dtype, and how large."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf
from tests.helpers import assert_same, fresh
from tests.lifecycles.engines import KINDS, TRAINERS, Regression, Trainer, World, batch
from tests.lifecycles.graphs import saved_bytes
from tests.lifecycles.watching import Watching, no_collection

pytestmark = pytest.mark.usefixtures("one_thread")


def half_precision(kind: str, watching: Watching) -> tuple[Trainer, list[tuple[Tensor, Tensor]]]:
    data = [tuple(one.bfloat16() for one in batch(number)) for number in range(4)]
    return TRAINERS[kind](World(), Regression(0).bfloat16(), data[0], backend=watching), data  # type: ignore[return-value]


def gradients_of(one: Trainer) -> dict[str, Tensor]:
    grads = one.grads if hasattr(one, "grads") else {name: own.grad for name, own in one.params.items()}
    found = {name: grad for name, grad in grads.items() if grad is not None}
    assert list(found) == list(one.params)
    return found


# 15
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_parameters_have_bf16_gradients_and_none_is_alive_after_the_step(kind: str) -> None:
    watching = Watching()
    one, data = half_precision(kind, watching)
    with no_collection():
        for number, given in enumerate(data):
            one.forward(given)
            one.backward()
            grads = gradients_of(one)
            assert {grad.dtype for grad in grads.values()} == {torch.bfloat16}
            dead = [weakref.ref(grad) for grad in grads.values()]
            assert len({id(ref()) for ref in dead}) == len(one.params)
            del grads
            one.step()
            assert [ref() for ref in dead] == [None] * len(dead), f"step {number}"
            shapes = {own.shape for own in one.buffers().values()}
            assert {shape for _, shape in watching.alive(len(watching.results))} <= shapes, "buffers alone live on"
    assert {own.dtype for own in one.params.values()} == {torch.bfloat16}


# 15
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_training_equals_eager(kind: str) -> None:
    one, data = half_precision(kind, Watching())
    twin = Regression(0).bfloat16()
    twin(*data[0]).backward()
    one.forward(data[0])
    one.backward()
    expected = {name: own.grad for name, own in twin.named_parameters()}
    assert_same(gradients_of(one), expected, rtol=2e-2, atol=1e-3)


class Deep(nn.Module):
    """Blocks that are checkpointed or not, with the same parameters."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16), nn.Tanh())
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.square().mean()


def deep(checkpointed: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Deep(checkpointed), torch.randn(24, 16)


def run(kind: str, checkpointed: bool) -> tuple[Any, Trainer, Watching]:
    """Loss and gradients of one step, what was trained and its backend."""
    watching, (model, x) = Watching(), deep(checkpointed)
    one = TRAINERS[kind](World(), model, (x,), backend=watching)
    one.forward((x,))
    one.backward()
    return (one.losses, gradients_of(one)), one, watching


# 19
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_on_and_off_have_equal_gradients_and_on_saves_less(kind: str) -> None:
    (off, plain, watched_off), (on, saving, watched_on) = run(kind, False), run(kind, True)
    assert_same(on, off)
    kept = [saved_bytes(one.fn) for one in (saving, plain)]
    assert kept[0] < kept[1] / 2
    if kind != "value_and_grad":
        assert watched_on.result_bytes[0] < watched_off.result_bytes[0] / 2, "what the forward really returned"
    profiles = [sf.profile(one.world.state, one.fn)[1] for one in (saving, plain)]
    assert [one.saved_bytes for one in profiles] == kept


# 19
@pytest.mark.parametrize("checkpointed", [False, True])
def test_checkpoints_equal_eager(checkpointed: bool) -> None:
    model, x = deep(checkpointed)
    twin = copy.deepcopy(model)
    twin(x).backward()
    expected = {name: own.grad for name, own in twin.named_parameters()}
    assert_same(run("autograd", checkpointed)[0][1], expected, rtol=1e-4, atol=1e-7)


# 19
def test_checkpoints_under_inductor_have_equal_gradients_and_save_less() -> None:
    found, kept = [], []
    for checkpointed in (False, True):
        model, x = deep(checkpointed)
        state, fn = sf.compile(sf.init_state(), model, (x,), backend="inductor")
        params = fresh(fn.params)
        fn(state, params, x)[1].backward()
        found.append({name: own.grad for name, own in params.items()})
        kept.append(saved_bytes(fn))
    assert_same(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert kept[1] < kept[0]
