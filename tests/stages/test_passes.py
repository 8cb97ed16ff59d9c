"""Passes at every level change the graph and are seen in the result; `chain` and `identity` obey their laws."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.cases.casekit import weighted_loss
from tests.helpers import assert_same, compiled
from tests.stages.pipelines import MODELS, inference_chain, replacing, texts, training_chain

GraphPass = Callable[[torch.fx.GraphModule], torch.fx.GraphModule]
X = torch.tensor([1.0, -2.0, 4.0])


def _triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3.0


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("level", "output_factor", "gradient_factor"),
    [("captured", 5.0, 5.0), ("joint", 5.0, 5.0), ("forward", 5.0, 3.0), ("backward", 3.0, 5.0)],
)
def test_a_pass_is_seen_in_the_result(level: str, output_factor: float, gradient_factor: float, backend: str) -> None:
    x = X.clone().requires_grad_()
    passes = sf.Passes(**{level: replacing(3.0, 5.0)})
    state, fn = compiled(_triple, (x,), passes=passes, backend=backend)
    _, out = fn(state, x)
    assert_same(out.detach(), X * output_factor)
    out.sum().backward()
    assert_same(x.grad, torch.full((3,), gradient_factor))


@pytest.mark.parametrize(("level", "factor"), [("captured", 5.0), ("forward", 5.0), ("joint", 3.0), ("backward", 3.0)])
def test_a_pass_on_an_inference_graph(level: str, factor: float) -> None:
    state, fn = compiled(_triple, (X,), passes=sf.Passes(**{level: replacing(3.0, 5.0)}))
    assert_same(fn(state, X)[1], X * factor)


def test_a_pass_is_applied_to_every_variant() -> None:
    state, fn = compiled(_triple, (X,), passes=sf.Passes(captured=replacing(3.0, 5.0)))
    assert_same(fn(state, torch.ones(2, 2))[1], torch.full((2, 2), 5.0))
    leaf = torch.ones(4, requires_grad=True)
    fn(state, leaf)[1].sum().backward()
    assert_same(leaf.grad, torch.full((4,), 5.0))


def test_a_pass_is_seen_by_value_and_grad() -> None:
    state, fn = compiled(lambda x: (x * 3.0).sum(), (X,), passes=sf.Passes(joint=replacing(3.0, 5.0)))
    _, (value, gradient) = sf.value_and_grad(fn)(state, X)
    assert_same(value, X.sum() * 5)
    assert_same(gradient, torch.full((3,), 5.0))


def _relu_to_gelu(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    copied = copy.deepcopy(gm)
    for node in copied.graph.nodes:
        if node.op == "call_module" or node.target in (torch.relu, torch.nn.functional.relu, "relu"):
            node.op, node.target, node.kwargs, node.args = "call_function", torch.nn.functional.gelu, {}, node.args[:1]
    copied.recompile()
    return copied


def test_an_operation_can_be_replaced_before_lowering() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    twin = nn.Sequential(copy.deepcopy(model[0]), nn.GELU(), copy.deepcopy(model[2]))
    state, fn = compiled(model, (x,), passes=sf.Passes(captured=_relu_to_gelu))
    _, out = fn(state, fn.params, x)
    assert_same(out, twin(x), rtol=1e-6, atol=1e-6)
    weighted_loss(out).backward()
    weighted_loss(twin(x)).backward()
    ours, theirs = ([one.grad for one in module.parameters()] for module in (model, twin))
    assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_gradient_can_be_doubled_in_the_backward_graph() -> None:
    def double_first_gradient(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        copied = copy.deepcopy(gm)
        output = copied.graph.output_node()
        first, *rest = output.args[0]
        with copied.graph.inserting_before(output):
            doubled = copied.graph.call_function(torch.ops.aten.mul.Tensor, (first, 2.0))
            doubled.meta = dict(first.meta)
        output.args = ([doubled, *rest],)
        copied.recompile()
        return copied

    model, inputs = MODELS["linear"]()
    state, fn = compiled(model, inputs, passes=sf.Passes(backward=double_first_gradient))
    weighted_loss(fn(state, fn.params, *inputs)[1]).backward()
    ours = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    weighted_loss(model(*inputs)).backward()
    factors = [(ours[name] / one.grad).mean().round().item() for name, one in model.named_parameters()]
    assert sorted(factors) == [1.0, 2.0]


@pytest.mark.parametrize("artifact", ["captured", "joint", "inference"])
def test_apply_returns_a_new_artifact_of_the_same_kind(artifact: str) -> None:
    chain = inference_chain if artifact == "inference" else training_chain
    made = chain(_Triple(), (X,))
    before, old = texts(made), getattr(made, artifact)
    state, new = sf.stages.apply(made.state, old, replacing(3.0, 5.0))
    assert state is made.state
    assert type(new) is type(old)
    assert "5.0" in str(new.graph)
    assert "3.0" not in str(new.graph)
    assert texts(made) == before
    assert new.graph.inputs == old.graph.inputs
    assert new.graph.outputs == old.graph.outputs


class _Triple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * 3.0


def test_a_pass_that_edits_what_it_is_given_harms_nobody() -> None:
    def edits(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        for node in gm.graph.nodes:
            node.args = tuple(5.0 if type(one) is float else one for one in node.args)
        gm.recompile()
        return gm

    chain = training_chain(_Triple(), (X,))
    before = texts(chain)
    for artifact in (chain.captured, chain.joint):
        sf.stages.apply(chain.state, artifact, edits)
    assert texts(chain) == before
    state, fn = compiled(_triple, (X,), passes=sf.Passes(captured=edits))
    assert_same(fn(state, X)[1], X * 5)


def _applied(artifact: Any, graph_pass: GraphPass) -> str:
    return str(sf.stages.apply(sf.init_state(), artifact, graph_pass)[1].graph)


THREE, FIVE, SEVEN = replacing(3.0, 5.0), replacing(5.0, 7.0), replacing(7.0, 9.0)


def test_identity_gives_back_what_it_was_given() -> None:
    chain = training_chain(_Triple(), (X,))
    assert sf.passes.identity(chain.joint.graph.gm) is chain.joint.graph.gm
    for artifact in (chain.captured, chain.joint):
        assert _applied(artifact, sf.passes.identity) == str(artifact.graph)


def test_an_empty_chain_is_the_identity() -> None:
    joint = training_chain(_Triple(), (X,)).joint
    assert _applied(joint, sf.passes.chain()) == str(joint.graph)


@pytest.mark.parametrize("one", [THREE, FIVE], ids=["acts", "does nothing"])
def test_identity_is_neutral_on_both_sides(one: GraphPass) -> None:
    joint = training_chain(_Triple(), (X,)).joint
    chain, identity = sf.passes.chain, sf.passes.identity
    assert _applied(joint, chain(identity, one)) == _applied(joint, one) == _applied(joint, chain(one, identity))
    assert _applied(joint, chain(one)) == _applied(joint, one)


def test_a_chain_goes_from_left_to_right() -> None:
    joint = training_chain(_Triple(), (X,)).joint
    assert "7.0" in _applied(joint, sf.passes.chain(THREE, FIVE))
    assert "5.0" in _applied(joint, sf.passes.chain(FIVE, THREE))


def test_chaining_is_associative() -> None:
    joint, chain = training_chain(_Triple(), (X,)).joint, sf.passes.chain
    left = _applied(joint, chain(chain(THREE, FIVE), SEVEN))
    right = _applied(joint, chain(THREE, chain(FIVE, SEVEN)))
    assert left == right == _applied(joint, chain(THREE, FIVE, SEVEN))
    assert "9.0" in left


def test_a_chain_is_applying_one_after_the_other() -> None:
    state, joint = sf.init_state(), training_chain(_Triple(), (X,)).joint
    _, first = sf.stages.apply(state, joint, THREE)
    _, second = sf.stages.apply(state, first, FIVE)
    assert str(second.graph) == _applied(joint, sf.passes.chain(THREE, FIVE))


def test_no_passes_is_the_same_as_identities() -> None:
    model, inputs = MODELS["linear"]()
    _, plain = compiled(model, inputs)
    identity = sf.passes.identity
    _, same = compiled(model, inputs, passes=sf.Passes(identity, identity, identity, identity))
    assert str(plain.joint_graph) == str(same.joint_graph)
    assert str(plain.forward_graph) == str(same.forward_graph)
