"""A failure in any stage arrives as it is, changes nothing, and leaves the old state working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.helpers import assert_same, compiled, fresh, process_unchanged, unchanged
from tests.stages.pipelines import MODELS, inference_chain, training_chain

LINEAR, INPUTS = MODELS["linear"]()


class Boom(Exception):
    """What the injected failures raise."""


BOOM = Boom("injected")


def fails(*_: Any, **__: Any) -> Any:
    raise BOOM


def fails_at_call(number: int) -> Callable[..., Any]:
    """A backend that compiles until its ``number``-th call, counted from one."""
    calls = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        calls.append(gm)
        if len(calls) == number:
            raise BOOM
        return gm.forward

    return backend


def _capture(state: Any) -> Any:
    return sf.stages.capture(state, LINEAR, INPUTS)


def _joint(state: Any) -> Any:
    return sf.stages.lower_training(*_capture(state))


def _split(state: Any) -> Any:
    return sf.stages.partition(*_joint(state))


INJECTIONS: dict[str, Callable[[Any], Any]] = {
    "captured pass": lambda state: sf.compile(state, LINEAR, INPUTS, backend="eager", passes=sf.Passes(captured=fails)),
    "joint pass": lambda state: sf.compile(state, LINEAR, INPUTS, backend="eager", passes=sf.Passes(joint=fails)),
    "forward pass": lambda state: sf.compile(state, LINEAR, INPUTS, backend="eager", passes=sf.Passes(forward=fails)),
    "backward pass": lambda state: sf.compile(state, LINEAR, INPUTS, backend="eager", passes=sf.Passes(backward=fails)),
    "backward pass, inductor": lambda state: sf.compile(
        state, LINEAR, INPUTS, backend="inductor", passes=sf.Passes(backward=fails)
    ),
    "forward backend": lambda state: sf.compile(state, LINEAR, INPUTS, backend=fails_at_call(1)),
    "backward backend": lambda state: sf.compile(state, LINEAR, INPUTS, backend=fails_at_call(2)),
    "apply stage": lambda state: sf.stages.apply(*_joint(state), fails),
    "partition stage": lambda state: sf.stages.partition(*_joint(state), fails),
    "forward stage": lambda state: sf.stages.compile_forward(*_split(state), fails),
    "backward stage": lambda state: sf.stages.compile_backward(*_split(state), fails),
}


@pytest.mark.parametrize("name", INJECTIONS)
def test_a_failure_in_a_stage_arrives_as_it_is(name: str) -> None:
    state, fn = compiled(nn.BatchNorm1d(3), INPUTS)
    expected = fn(state, fn.params, *INPUTS)
    copy_of_state = sf.state.tree_map(torch.clone, state)
    with process_unchanged(), unchanged(LINEAR.state_dict(), INPUTS), pytest.raises(Boom, match="injected") as caught:
        INJECTIONS[name](state)
    assert caught.value is BOOM
    _old_state_still_works(state, copy_of_state, fn, expected)


def _old_state_still_works(state: Any, copy_of_state: Any, fn: Any, expected: Any) -> None:
    assert sf.tree_equal(state, copy_of_state)
    after, out = fn(state, fn.params, *INPUTS)
    assert sf.tree_equal(after, expected[0])
    assert_same(out, expected[1])
    new_state, linear = sf.compile(state, LINEAR, INPUTS, backend="eager")
    assert linear.owner == state.next_token
    assert_same(linear(new_state, linear.params, *INPUTS)[1], LINEAR(*INPUTS))


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the width must be even")


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Mutates(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.poisson(x)


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize("model", [Raises, Branches, Mutates, Draws], ids=lambda model: model.__name__)
def test_a_model_that_fails_changes_nothing(model: type[nn.Module], capture: str) -> None:
    state, fn = compiled(nn.BatchNorm1d(3), INPUTS)
    expected = fn(state, fn.params, *INPUTS)
    copy_of_state = sf.state.tree_map(torch.clone, state)
    with process_unchanged(), unchanged(INPUTS), pytest.raises((ValueError, sf.CaptureError), match=r"\w"):
        sf.compile(state, model(), INPUTS, backend="eager", capture=capture)
    _old_state_still_works(state, copy_of_state, fn, expected)


@pytest.mark.parametrize("stage", ["inference", "forward"])
def test_a_failing_compiler_of_the_inference_graph(stage: str) -> None:
    with torch.no_grad():
        if stage == "inference":
            chain = inference_chain(LINEAR, INPUTS)
            with process_unchanged(), pytest.raises(Boom, match="injected"):
                sf.stages.compile_inference(chain.state, chain.inference, fails)
            assert_same(chain.fn(chain.state, chain.fn.params, *INPUTS)[1], LINEAR(*INPUTS))
        else:
            with process_unchanged(), pytest.raises(Boom, match="injected"):
                compiled(LINEAR, INPUTS, passes=sf.Passes(forward=fails))


def test_a_later_variant_that_fails_leaves_the_first_one() -> None:
    state, fn = compiled(LINEAR, INPUTS, backend=fails_at_call(3))
    before = fn.cache_info()
    with process_unchanged(), pytest.raises(Boom, match="injected") as caught:
        fn(state, fn.params, torch.ones(9, 3))
    assert caught.value is BOOM
    assert fn.cache_info().compiled_graphs == before.compiled_graphs
    assert_same(fn(state, fn.params, *INPUTS)[1], LINEAR(*INPUTS))
    assert_same(fn(state, fn.params, torch.ones(9, 3))[1], LINEAR(torch.ones(9, 3)))


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_compiled_code_that_fails_at_run_time_lets_its_exception_through(when: str) -> None:
    calls: list[str] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        role = "backward" if calls else "forward"
        calls.append(role)
        return fails if role == when else gm.forward

    state, fn = compiled(LINEAR, INPUTS, backend=backend)
    params = fresh(fn.params)
    with process_unchanged(), pytest.raises(Boom, match="injected"):
        fn(state, params, *INPUTS)[1].sum().backward()
    assert sf.tree_equal(state, sf.state.tree_map(torch.clone, state))
    state, other = sf.compile(state, LINEAR, INPUTS, backend="eager")
    assert_same(other(state, other.params, *INPUTS)[1], LINEAR(*INPUTS))


@pytest.mark.parametrize("name", ["linear", "convolution", "dictionary"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_success_changes_nothing_either(name: str, compiler: str) -> None:
    model, inputs = MODELS[name]()
    with process_unchanged(), unchanged(model.state_dict(), inputs):
        chain = training_chain(model, inputs, compiler)
        inference_chain(model, inputs, compiler)
        state, out = chain.fn(chain.state, chain.fn.params, *inputs)
        sf.release(state, chain.fn)
    assert out is not None


def test_a_pass_that_breaks_the_graph_is_told_so() -> None:
    def drops_an_output(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        gm.graph.output_node().args = ((),)
        gm.recompile()
        return gm

    state = sf.init_state()
    with process_unchanged(), pytest.raises(sf.SpecError, match=r"Expected .*, got .*"):
        sf.compile(state, LINEAR, INPUTS, backend="eager", passes=sf.Passes(captured=drops_an_output))
