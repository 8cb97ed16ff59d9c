"""Networks of several kinds in which something is saved for the backward, each with its options of a compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scoped_fn as sf
from scoped_fn.demo.gpt import GPT, GPTConfig
from tests.fp8.networks import Block, mlp
from tests.fp8.scoped import recipe
from tests.helpers import assert_same, fresh


class SquareLoss(nn.Module):
    """The mean square of what a network gives."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *inputs: Tensor) -> Tensor:
        value = self.net(*inputs).square().mean()
        assert isinstance(value, Tensor)
        return value


class Dropped(nn.Module):
    """Dropout and noise between cheap operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x).tanh().exp(), 0.5).sin()
        hidden = hidden + torch.randn_like(hidden).sigmoid() * hidden
        out = self.second(F.dropout(hidden * hidden, 0.25))
        assert isinstance(out, Tensor)
        return out


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4), nn.Softplus())


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten()
    )


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2))


@dataclass(frozen=True)
class Network:
    """How to make a network and its inputs, and how it is compiled.

    Attributes:
        make: Returns the network.
        inputs: Returns its inputs.
        random: Whether it draws.
        fp8: Whether it is compiled under delayed scaling.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    random: bool = False
    fp8: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        made = self.make()
        return made if isinstance(made, GPT) else SquareLoss(made)

    def compiled(self, passes: Any = (), **options: Any) -> tuple[sf.CompilerState, sf.CompiledFn]:
        state = sf.autocast(sf.init_state(), recipe()) if self.fp8 else sf.init_state()
        rng = "torch" if self.random else "key"
        options = {"backend": "eager", "rng": rng, "passes": passes, **options}
        return sf.compile(state, self.model(), self.inputs(), **options)

    def engine(self, passes: Any = ()) -> sf.Engine:
        rng, of = "torch" if self.random else "key", recipe() if self.fp8 else None
        return sf.Engine(self.model(), self.inputs(), backend="eager", rng=rng, recipe=of, passes=passes)


def tokens() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(2))
    return drawn[:, :-1], drawn[:, 1:]


NETWORKS = {
    "mlp": Network(layers, lambda: (torch.randn(16, 8),)),
    "convolutions": Network(convolutions, lambda: (torch.randn(3, 2, 8, 8),)),
    "gpt": Network(lambda: GPT(GPTConfig(layers=1, width=32, context=8, vocabulary=64)), tokens),
    "attention": Network(Block, lambda: (torch.randn(2, 5, 16),)),
    "dropout": Network(Dropped, lambda: (torch.randn(16, 8),), random=True),
    "batch norm": Network(normed, lambda: (torch.randn(3, 2, 8, 8),)),
    "fp8": Network(mlp, lambda: (torch.randn(6, 8),), fp8=True),
}

WITH_ENGINE = ("mlp", "dropout", "batch norm", "fp8")  # nothing, randomness, buffers and scales that go with a call


def steps_by_autograd(network: Network, state: sf.CompilerState, fn: sf.CompiledFn, count: int = 2) -> Any:
    """Losses, gradients and buffers of some steps with the same parameters."""
    found, params = [], fresh(fn.params)
    torch.manual_seed(5)
    for _ in range(count):
        state, loss = fn(state, params, *network.inputs())
        loss.backward()
        found.append((loss.detach(), {name: own.grad.clone() for name, own in params.items() if own.grad is not None}))
    return found, dict(state.buffers.get(fn.owner, {}))


def steps_at_once(network: Network, state: sf.CompilerState, fn: sf.CompiledFn, count: int = 2) -> Any:
    """The same by `value_and_grad`; with FP8 scales, which it updates."""
    found, step = [], sf.value_and_grad(fn)
    torch.manual_seed(5)
    for _ in range(count):
        state, result = step(state, fn.params, *network.inputs())
        found.append(result)
    scales = [tensor for held in state.fp8.values() for tensor in (held.scale, held.amax_history)]
    return found, dict(state.buffers.get(fn.owner, {})), scales


def steps_of_an_engine(network: Network, engine: sf.Engine, count: int = 2) -> Any:
    """The same by an engine."""
    found = []
    torch.manual_seed(5)
    for _ in range(count):
        loss = engine(*network.inputs())
        loss.backward()
        engine.end_step()
        found.append((loss.detach(), [own.grad.clone() for own in engine.parameters() if own.grad is not None]))
    scales = [tensor for held in engine.state.fp8.values() for tensor in (held.scale, held.amax_history)]
    return found, dict(engine.model.named_buffers()), scales


@functools.cache
def plain(name: str) -> tuple[sf.CompilerState, sf.CompiledFn]:
    """A network compiled without passes; both are values, so one serves every test."""
    return NETWORKS[name].compiled()


@functools.cache
def plain_training(name: str) -> list[Any]:
    """What training without passes gives, in every way of training."""
    network = NETWORKS[name]
    by_function = [way(network, *plain(name)) for way in (steps_by_autograd, steps_at_once)]
    return [*by_function, steps_of_an_engine(network, network.engine()) if name in WITH_ENGINE else None]


def assert_same_training(name: str, passes: Any) -> None:
    """With the passes and without them: the same bits in every way of training."""
    network = NETWORKS[name]
    state, fn = network.compiled(passes)
    by_autograd, at_once, by_engine = plain_training(name)
    assert_same(steps_by_autograd(network, state, fn), by_autograd, what="autograd")
    assert_same(steps_at_once(network, state, fn), at_once, what="value_and_grad")
    if name in WITH_ENGINE:
        assert_same(steps_of_an_engine(network, network.engine(passes)), by_engine, what="an engine")
