"""Where exceptions come from in the tests of faults, and the scene in which they must change nothing."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch import nn

import scoped_fn as sf
from tests.cases.casekit import weighted_loss
from tests.generators.arrays import kept
from tests.generators.operations import AUTOTUNE, LIMIT
from tests.helpers import assert_same, fresh, gradients, process_unchanged

OVERRIDDEN = 77
X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Boom(Exception):
    """What is raised, unless it is an interrupt."""


class Trap:
    """Raises once it is set, and notes the value of the overridden setting at that point."""

    def __init__(self, error: BaseException, *, is_set: bool = True) -> None:
        self.error, self.is_set = error, is_set
        self.seen: list[int] = []

    def __call__(self, *given: Any, **_: Any) -> Any:
        if self.is_set:
            self.seen.append(dynamo_config.recompile_limit)
            raise self.error
        return given[0] if given else None

    def backend(self, where: str) -> Callable[..., Any]:
        """A backend with the trap at a place: "compile 2" is its second call, "run 2" a run of what that made."""
        calls = itertools.count(1)

        def compiler(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            number = next(calls)
            if where == f"compile {number}":
                with torch._inductor.config.patch(max_autotune=True):
                    self()

            def run(*tensors: torch.Tensor) -> Any:
                if where == f"run {number}":
                    self()
                return gm(*tensors)

            return run

        return compiler


def model(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def step(state: sf.CompilerState, fn: sf.CompiledFn, x: torch.Tensor = X) -> Any:
    """What a training step gives: output, gradients, and the buffers of the function."""
    params = fresh(fn.params)
    state, out = fn(state, params, x)
    weighted_loss(out).backward()  # type: ignore[no-untyped-call]
    return out.detach(), gradients(params), dict(state.buffers.get(fn.owner, {}))


class Scene:
    """Two functions at work in one state, the first with overrides, and what each gave when it was alone."""

    def __init__(self) -> None:
        alone = [sf.compile(sf.init_state(), model(seed), (X,), backend="eager") for seed in range(2)]
        self.expected = [step(state, fn) for state, fn in alone]
        self.state, first = sf.compile(sf.init_state(), model(0), (X,), backend="eager")
        self.state, second = sf.compile(self.state, model(1), (X,), backend="eager")
        self.state = sf.set_override(sf.set_override(self.state, first, AUTOTUNE, True), first, LIMIT, OVERRIDDEN)
        self.functions = (first, second)

    def new_owner(self) -> tuple[sf.CompilerState, int]:
        """The state with one more owner, with an override, for a function that is to be compiled."""
        state, owner = sf.acquire(self.state, "victim")
        return sf.set_override(state, owner, LIMIT, OVERRIDDEN), owner

    def victim(self, **options: Any) -> tuple[sf.CompilerState, sf.CompiledFn]:
        """One more function, with an override."""
        state, owner = self.new_owner()
        return sf.compile(state, model(5), (X,), owner=owner, **{"backend": "eager", **options})

    def check(self) -> None:
        """Both functions give the same bits as each alone, and another thread can compile."""
        for fn, expected in zip(self.functions, self.expected, strict=True):
            assert_same(step(self.state, fn), expected)
        made: list[Any] = []
        thread = threading.Thread(
            target=lambda: made.append(sf.compile(self.state, torch.sin, (X,), backend="eager")), daemon=True
        )
        thread.start()
        thread.join(60)
        assert made, "a lock is held still"

    @contextlib.contextmanager
    def nothing_happens_but(self, error: BaseException, *states: sf.CompilerState) -> Iterator[None]:
        """The block raises the very error, and nothing else of it is left."""
        limit = dynamo_config.recompile_limit
        with process_unchanged(), kept(self.state, *states), pytest.raises(type(error)) as caught:
            yield
        assert caught.value is error
        assert dynamo_config.recompile_limit == limit != OVERRIDDEN
        self.check()
