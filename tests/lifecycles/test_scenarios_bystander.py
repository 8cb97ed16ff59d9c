"""A bystander compiled by plain `torch.compile`: never compiled again, whatever we do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import scoped_fn as sf
from tests.helpers import assert_same
from tests.lifecycles.engines import KINDS, Regression, Trainer, World, batch, trainer
from tests.lifecycles.graphs import passes_at, sine_pass

pytestmark = pytest.mark.usefixtures("one_thread")
AUTOTUNE = "torch._inductor.config.max_autotune"


class TheirModel(nn.Module):
    """A class of their own: Dynamo stops at eight functions that share their code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x).tanh()
        assert isinstance(out, Tensor)
        return out


class Bystander:
    """Two functions of somebody else, one of them in training."""

    def __init__(self) -> None:
        self.counter = CompileCounter()
        self.model = TheirModel()
        self.training = torch.compile(self.model, backend=self.counter)
        self.quiet = torch.compile(lambda x: x.sin() + 1, backend=self.counter)
        self.x = torch.randn(5, 3)
        self.call()
        self.compiled = self.counter.frame_count

    def call(self) -> None:
        self.training(self.x).sum().backward()
        with torch.no_grad():
            self.quiet(self.x)

    def check(self, what: str) -> None:
        with torch._dynamo.config.patch(error_on_recompile=True):
            self.call()
        assert self.counter.frame_count == self.compiled == 2, what


@pytest.fixture(scope="module")
def bystander() -> Iterator[Bystander]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the tests: Dynamo guards on it
    one = Bystander()
    yield one
    one.check("at the end")
    torch.set_num_threads(threads)


def everything(one: Trainer) -> dict[str, Callable[[], Any]]:
    """All that can be done with a function, by name, in an order in which it can be done."""

    def overriding() -> None:
        one.world.state = sf.set_override(one.world.state, one.fn, AUTOTUNE, True)

    def dropping() -> None:
        one.world.state = sf.drop_override(one.world.state, one.fn, AUTOTUNE)

    def within_effects() -> None:
        with sf.effects(one.world.state, one.fn):
            assert torch._inductor.config.max_autotune

    def profiling() -> None:
        one.world.state = sf.push_inputs(one.world.state, one.fn, batch(0))
        one.world.state, profile = sf.profile(one.world.state, one.fn)
        assert profile.complete

    def other_constants() -> None:
        one.world.state = sf.set_constant(sf.detect(one.world.state), "cuda.capability", (10, 0))

    return {
        "train": lambda: one.train(batch(0)),
        "override": overriding,
        "evaluate": lambda: one.evaluate(batch(1)),
        "effects": within_effects,
        "advance": lambda: one.advance(3),
        "recompile": lambda: one.recompile(sf.Passes(captured=sine_pass)),
        "train again": lambda: one.train(batch(2)),
        "profile": profiling,
        "guided": lambda: one.recompile([sf.passes.memory_budget(0.5), sf.passes.order_for_memory()]),
        "constants": other_constants,
        "another shape": lambda: one.evaluate(batch(0, rows=9)),
        "drop override": dropping,
        "train at last": lambda: one.train(batch(3)),
        "release": one.release,
    }


# 18
@pytest.mark.parametrize("kind", KINDS)
def test_a_bystander_is_never_compiled_again(kind: str, bystander: Bystander) -> None:
    one = trainer(kind, schedule=sf.Schedule([(2, sf.Passes(captured=sine_pass))]))
    bystander.check("compile")
    for name, act in everything(one).items():
        act()
        bystander.check(name)


# 18
def test_a_bystander_of_the_same_class_and_of_the_same_code_is_left_alone(bystander: Bystander) -> None:
    model, counter = Regression(0), CompileCounter()
    theirs = torch.compile(model, backend=counter)
    theirs(*batch(0)).backward()
    world = World()
    for seed in range(10):
        trainer("autograd", seed, world).train(batch(0))
    with torch._dynamo.config.patch(error_on_recompile=True):
        theirs(*batch(1)).backward()
    assert counter.frame_count == 1


# 18
@pytest.mark.parametrize("level", ["captured", "joint", "partition", "saved", "forward", "backward"])
def test_a_bystander_is_left_alone_by_a_pass_that_raises(level: str, bystander: Bystander) -> None:
    def raises(*_: Any) -> Any:
        bystander.check("inside a pass")
        raise ArithmeticError(level)

    with pytest.raises(ArithmeticError, match=level):
        trainer("autograd", passes=passes_at(level, raises))
    bystander.check("after it")


# 18
def test_a_bystander_whose_loss_waits_is_left_alone(bystander: Bystander) -> None:
    theirs = bystander.training(bystander.x).square().sum()
    world = World()
    one = trainer("autograd", 0, world)
    one.forward(batch(0))
    theirs.backward()
    waiting = bystander.training(bystander.x).square().sum()
    one.recompile(sf.passes.memory_budget(0.5))
    one.backward()
    one.release()
    bystander.model.zero_grad()
    waiting.backward()
    grads = [own.grad for own in bystander.model.parameters()]
    bystander.model.zero_grad()
    bystander.model(bystander.x).square().sum().backward()
    assert_same(grads, [own.grad for own in bystander.model.parameters()], rtol=1e-6, atol=1e-6)
