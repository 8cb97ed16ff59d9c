"""An exception while something runs: compiled code, a kernel, the block of `effects`, a profile, an engine."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch import nn

import scoped_fn as sf
from tests.generators.arrays import kept
from tests.generators.operations import LIMIT
from tests.helpers import assert_same, fresh, process_unchanged
from tests.lifecycles.traps import OVERRIDDEN, Boom, Scene, Trap, X, model, step

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("where", ["run 1", "run 2"])
def test_at_the_launch_of_compiled_code(scene: Scene, error: BaseException, where: str) -> None:
    trap = Trap(error, is_set=False)
    state, fn = scene.victim(backend=trap.backend(where))
    before = step(state, fn)
    trap.is_set = True
    with scene.nothing_happens_but(error, state):
        step(state, fn)
    assert trap.seen == [dynamo_config.recompile_limit], "overrides are for compile calls"
    trap.is_set = False
    assert_same(step(state, fn), before)


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("kernel", ["_cast", "_is_of_rows"])
def test_at_the_launch_of_a_kernel(
    scene: Scene, error: BaseException, kernel: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, fn = fp8_victim(scene)
    before = step(state, fn, FP8_X)
    params = fresh(fn.params)
    if when == "backward":
        _, out = fn(state, params, FP8_X)
    with monkeypatch.context() as patched, scene.nothing_happens_but(error, state):
        patched.setattr(f"scoped_fn.kernels._reference.{kernel}", Trap(error))
        out = fn(state, params, FP8_X)[1] if when == "forward" else out
        out.sum().backward()
    assert_same(step(state, fn, FP8_X), before)


FP8_X = torch.linspace(-1, 1, 16 * 32).reshape(16, 32)


def fp8_victim(scene: Scene) -> tuple[sf.CompilerState, sf.CompiledFn]:
    torch.manual_seed(0)
    state, owner = scene.new_owner()
    state = sf.autocast(state, sf.DelayedScaling(amax_history_len=4))
    return sf.compile(state, nn.Sequential(nn.Linear(32, 16)), (FP8_X,), owner=owner, backend="eager")


def test_inside_effects(scene: Scene, error: BaseException) -> None:
    trap = Trap(error)

    def work() -> None:
        with sf.effects(scene.state, scene.functions[0]), sf.effects(scene.state, scene.functions[1]):
            assert sf.overrides_of(scene.state, scene.functions[0])[LIMIT] == OVERRIDDEN
            scene.victim(passes=sf.Passes(joint=trap))

    with scene.nothing_happens_but(error):
        work()
    assert trap.seen == [OVERRIDDEN]


def test_in_a_node_while_profiling(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    state, fn = fp8_victim(scene)
    state = sf.push_inputs(state, fn, (FP8_X,))
    before = step(state, fn, FP8_X)
    with process_unchanged(), kept(state, scene.state), monkeypatch.context() as patched:
        patched.setattr("scoped_fn.kernels._reference._cast", Trap(Boom("a node broke")))
        after, profile = sf.profile(state, fn)
    assert not profile.complete
    assert "a node broke" in str(profile.error)
    assert_same(step(after, fn, FP8_X), before)
    assert sf.profile(state, fn)[1].complete, "the old state can be profiled again"
    scene.check()


def test_an_interrupt_while_profiling(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    error = KeyboardInterrupt("injected")
    state, fn = fp8_victim(scene)
    before = step(state, fn, FP8_X)
    with monkeypatch.context() as patched, scene.nothing_happens_but(error, state):
        patched.setattr("scoped_fn.kernels._reference._cast", Trap(error))
        sf.profile(state, fn)
    assert_same(step(state, fn, FP8_X), before)


@pytest.mark.parametrize("where", ["run 1", "run 2"])
def test_at_a_launch_by_an_engine(scene: Scene, error: BaseException, where: str) -> None:
    trap = Trap(error, is_set=False)
    engine = sf.Engine(model(5), (X,), backend=trap.backend(where))
    twin = sf.Engine(model(5), (X,), backend="eager")
    trap.is_set = True
    buffers = {name: own.clone() for name, own in engine.model.named_buffers()}

    def train(one: sf.Engine) -> Any:
        one.zero_grad()
        one(X).square().sum().backward()
        return {name: own.grad for name, own in one.model.named_parameters()}

    with scene.nothing_happens_but(error):
        train(engine)
    error.__traceback__ = None  # it holds the loss
    gc.collect()
    assert engine.state.owners[engine.fn.owner].frames == (), "no frame waits for a backward that will not come"
    trap.is_set = False
    if where == "run 2":  # the forward had been: its batch counts
        twin(X)
    else:
        assert_same(dict(engine.model.named_buffers()), buffers)
    assert_same(train(engine), train(twin))
    assert_same(dict(engine.model.named_buffers()), dict(twin.model.named_buffers()))
