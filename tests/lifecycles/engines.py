"""What the scenarios share: a model in training in three ways behind one face, and all orders of moves."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import scoped_fn as sf
from tests.helpers import assert_same, fresh

Batch = tuple[Tensor, Tensor]
KINDS = ("autograd", "value_and_grad", "engine")
RATE = 0.05


class Regression(nn.Module):
    """The mean squared error of a network with a batch norm, which has buffers."""

    def __init__(self, seed: int, width: int = 8) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = (self.net(x) - y).square().mean()
        assert isinstance(loss, Tensor)
        return loss


class Plain(nn.Module):
    """A regression without buffers: a call leaves the state as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = (self.net(x) - y).square().mean()
        assert isinstance(loss, Tensor)
        return loss


def batch(number: int, rows: int = 6) -> Batch:
    """The batch of a step."""
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


@dataclass
class World:
    """Where functions that share a state keep it."""

    state: sf.CompilerState = field(default_factory=sf.init_state)


class Trainer:
    """A model in training by plain autograd: forward, backward and step, which may be apart."""

    engine: sf.Engine  # of an `EngineTrainer`
    grads: dict[str, Tensor]  # of a `WholeStepTrainer`, before its step

    def __init__(self, world: World, model: nn.Module, example: Any = None, *, backend: Any = "eager", **options: Any):
        self.world, self.losses = world, list[Tensor]()
        self.pending: Tensor | None = None
        self.begin(model, batch(0) if example is None else example, {"backend": backend, **options})

    def begin(self, model: nn.Module, example: Any, options: dict[str, Any]) -> None:
        self.world.state, self.fn = sf.compile(self.world.state, model, example, **options)
        self.params: dict[str, Tensor] = fresh(self.fn.params)
        self.optimizer = sgd(self.params.values())

    def loss_of(self, *given: Tensor) -> Tensor:
        self.world.state, loss = self.fn(self.world.state, self.params, *given)
        assert isinstance(loss, Tensor)
        return loss

    def forward(self, given: Sequence[Tensor]) -> None:
        self.pending = self.loss_of(*given)
        self.losses.append(self.pending.detach().clone())

    def backward(self) -> None:
        assert self.pending is not None
        if self.pending.requires_grad:
            self.pending.backward()  # type: ignore[no-untyped-call]
        self.pending = None

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, given: Sequence[Tensor]) -> None:
        """One training step, all of it."""
        self.forward(given)
        self.backward()
        self.step()

    def evaluate(self, given: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            return self.loss_of(*given)

    def recompile(self, passes: Any) -> None:
        self.world.state, self.fn = sf.recompile(self.world.state, self.fn, passes)

    def advance(self, number: int) -> None:
        self.world.state, self.fn = sf.advance(self.world.state, self.fn, number)

    def release(self) -> None:
        self.world.state = sf.release(self.world.state, self.fn)

    def buffers(self) -> dict[str, Tensor]:
        return dict(self.world.state.buffers.get(self.fn.owner, {}))

    def outcome(self) -> Any:
        """All that a run comes to: losses, parameters and buffers."""
        params = {name: one.detach() for name, one in self.params.items()}
        return [*self.losses], params, self.buffers()


class WholeStepTrainer(Trainer):
    """The same by `value_and_grad`: the forward is all of it but for the step."""

    def forward(self, given: Sequence[Tensor]) -> None:
        step = sf.value_and_grad(self.fn)
        self.world.state, (loss, self.grads) = step(self.world.state, self.params, *given)
        self.losses.append(loss.clone())

    def backward(self) -> None:
        assert set(self.grads) == set(self.params)

    def step(self) -> None:
        self.params = {name: own.detach() - RATE * self.grads[name] for name, own in self.params.items()}
        del self.grads


class EngineTrainer(Trainer):
    """The same by an `Engine`, which keeps its state: the world is the engine."""

    def begin(self, model: nn.Module, example: Any, options: dict[str, Any]) -> None:
        self.engine = sf.Engine(model, example, state=self.world.state, **options)
        self.params = dict(model.named_parameters())
        self.optimizer = sgd(self.params.values())
        self.world = self.engine  # type: ignore[assignment]

    @property
    def fn(self) -> sf.CompiledFn:  # type: ignore[override]
        return self.engine.fn

    def loss_of(self, *given: Tensor) -> Tensor:
        loss = self.engine(*given)
        assert isinstance(loss, Tensor)
        return loss

    def recompile(self, passes: Any) -> None:
        self.engine.recompile(passes)

    def advance(self, number: int) -> None:
        self.engine.advance(number)


TRAINERS = {"autograd": Trainer, "value_and_grad": WholeStepTrainer, "engine": EngineTrainer}


def sgd(params: Any) -> torch.optim.Optimizer:
    """Plain descent, one tensor after the other; the frozen ones stay."""
    return torch.optim.SGD(list(params), lr=RATE, foreach=False)


def trainer(kind: str, seed: int = 0, world: World | None = None, **options: Any) -> Trainer:
    """A regression in training."""
    return TRAINERS[kind](World() if world is None else world, Regression(seed), **options)


def plain_trainer(kind: str, backend: Any = "eager") -> Trainer:
    """The same without buffers."""
    torch.manual_seed(0)
    return TRAINERS[kind](World(), Plain(), backend=backend)


def alone(kind: str, seed: int, numbers: Iterable[int], **options: Any) -> Any:
    """What a regression comes to that trains on these batches and is the only one."""
    return _alone(kind, seed, tuple(numbers), tuple(options.items()))


@functools.cache
def _alone(kind: str, seed: int, numbers: tuple[int, ...], options: tuple[tuple[str, Any], ...]) -> Any:
    one = trainer(kind, seed, **dict(options))
    for number in numbers:
        one.train(batch(number))
    return one.outcome()


def assert_as_alone(
    one: Trainer, kind: str, seed: int, numbers: Iterable[int], *, what: str = "", **options: Any
) -> None:
    """Bit for bit what the same trainer gives when it is the only one."""
    assert_same(one.outcome(), alone(kind, seed, numbers, **options), what=what or kind)


def merges(*sequences: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All orders in which sequences can be interleaved, each one's own order kept."""
    left = [one for one in sequences if one]
    if not left:
        yield ()
    for n, one in enumerate(left):
        for rest in merges(*left[:n], one[1:], *left[n + 1 :]):
            yield (one[0], *rest)
