"""The pipeline, one stage at a time, against eager."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf
from tests.cases.casekit import weighted_loss
from tests.helpers import assert_same, compiled, fresh, tensors
from tests.stages.pipelines import MODELS, inference_chain, texts, training_chain

EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


@EVERY_MODEL
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_training_stage_by_stage_equals_eager(name: str, compiler: str) -> None:
    model, inputs = MODELS[name]()
    twin = copy.deepcopy(model)
    chain = training_chain(model, inputs, compiler)
    params = fresh(chain.fn.params)
    state, out = chain.fn(chain.state, params, *inputs)
    expected = twin(*inputs)
    assert_same(out, expected, rtol=1e-5, atol=1e-5)
    weighted_loss(out).backward()
    weighted_loss(expected).backward()
    grads = {name: one.grad for name, one in twin.named_parameters()}
    assert_same({name: params[name].grad for name in grads}, grads, rtol=1e-4, atol=1e-5)
    held = state.buffers.get(chain.fn.owner, {})
    assert_same(
        {name: held[name] for name, _ in twin.named_buffers()}, dict(twin.named_buffers()), rtol=1e-5, atol=1e-5
    )


@EVERY_MODEL
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("training", [True, False])
def test_inference_stage_by_stage_equals_eager(name: str, compiler: str, training: bool) -> None:
    model, inputs = MODELS[name]()
    model.train(training)
    chain = inference_chain(model, inputs, compiler)
    with torch.no_grad():
        _, out = chain.fn(chain.state, chain.fn.params, *inputs)
        assert_same(out, copy.deepcopy(model)(*inputs), rtol=1e-5, atol=1e-5)
    assert not any(one.requires_grad for one in tensors(out))


@EVERY_MODEL
def test_compile_is_exactly_this_chain(name: str) -> None:
    model, inputs = MODELS[name]()
    state, fn = compiled(model, inputs)
    chain = training_chain(model, inputs)
    assert sf.tree_equal(state, chain.state)
    by_stage = texts(chain)
    assert str(fn.captured.graph) == by_stage["captured"]
    assert str(fn.joint_graph) == by_stage["joint"]
    assert str(fn.forward_graph) == by_stage["forward"]
    assert str(fn.backward_graph) == by_stage["backward"]
    with torch.no_grad():
        _, inferred = compiled(model, inputs)
    assert str(inferred.forward_graph) == texts(inference_chain(model, inputs))["inference"]


@EVERY_MODEL
def test_each_stage_is_deterministic(name: str) -> None:
    model, inputs = MODELS[name]()
    assert texts(training_chain(model, inputs)) == texts(training_chain(model, inputs))
    assert texts(inference_chain(model, inputs)) == texts(inference_chain(model, inputs))


@EVERY_MODEL
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_each_stage_leaves_what_it_was_given_and_repeats(name: str, compiler: str) -> None:
    chain = training_chain(*MODELS[name](), compiler)
    inferred = inference_chain(*MODELS[name](), compiler)
    state, before, before_inference = chain.state, texts(chain), texts(inferred)
    assert str(sf.stages.lower_training(state, chain.captured, backend=compiler)[1].graph) == before["joint"]
    lowered = sf.stages.lower_inference(state, chain.captured, backend=compiler)[1]
    assert str(lowered.graph) == before_inference["inference"]
    _, again = sf.stages.partition(state, chain.joint)
    assert (str(again.forward), str(again.backward)) == (before["forward"], before["backward"])
    assert (again.saved, again.saved_bytes) == (chain.split.saved, chain.split.saved_bytes)
    for again_by in (compiler, _takes_the_graph_apart):
        sf.stages.compile_forward(state, chain.split, again_by)
        sf.stages.compile_backward(state, chain.split, again_by)
        sf.stages.compile_inference(inferred.state, inferred.inference, again_by)
    assert texts(chain) == before
    assert texts(inferred) == before_inference


def _takes_the_graph_apart(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    for node in list(gm.graph.nodes):
        if node.op == "call_function":
            node.name = f"touched_{node.name}"
    gm.graph.create_node("call_function", torch.ops.aten.relu.default, (next(iter(gm.graph.nodes)),))
    return gm


@EVERY_MODEL
def test_stages_after_capture_return_the_very_state(name: str) -> None:
    chain = training_chain(*MODELS[name]())
    state = chain.state
    assert sf.stages.lower_training(state, chain.captured)[0] is state
    assert sf.stages.lower_inference(state, chain.captured)[0] is state
    assert sf.stages.apply(state, chain.joint, sf.passes.identity)[0] is state
    assert sf.stages.partition(state, chain.joint)[0] is state
    assert sf.stages.compile_forward(state, chain.split)[0] is state
    assert sf.stages.compile_backward(state, chain.split)[0] is state


@EVERY_MODEL
def test_every_graph_is_well_formed_and_named(name: str) -> None:
    model, inputs = MODELS[name]()
    chain, inferred = training_chain(model, inputs), inference_chain(model, inputs)
    graphs = [
        chain.captured.graph,
        chain.joint.graph,
        chain.split.forward,
        chain.split.backward,
        inferred.inference.graph,
    ]
    for graph in graphs:
        graph.gm.graph.lint()
        assert len(graph.inputs) == len(graph.gm.graph.find_nodes(op="placeholder"))
        assert len(set(graph.inputs)) == len(graph.inputs)
        assert len(graph.outputs) == len(graph.gm.graph.output_node().args[0])
    for name, _ in model.named_parameters():
        for graph in (*graphs[:3], graphs[4]):
            assert name in graph.inputs
            assert name in str(graph)
        assert any(name in output for output in chain.split.backward.outputs)


@EVERY_MODEL
def test_artifacts_are_frozen(name: str) -> None:
    chain = training_chain(*MODELS[name]())
    for artifact in (chain.captured, chain.joint, chain.split, chain.forward, chain.joint.graph):
        field = dataclasses.fields(artifact)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError, match=field):
            setattr(artifact, field, None)


def test_what_is_saved_is_named_and_counted() -> None:
    model, inputs = MODELS["linear"]()
    saved_by_linear = training_chain(model, inputs).split
    assert saved_by_linear.saved_bytes == 0, "a linear layer keeps only its input, which lives anyway"
    chain = training_chain(nn.Sequential(model, nn.Sigmoid()), inputs)
    assert chain.split.saved_bytes == 4 * 2 * 4
    assert len(chain.split.saved) == len(set(chain.split.saved))
    assert set(chain.split.saved) <= set(chain.split.backward.inputs)


class TwoLayers(nn.Module):
    def __init__(self, use: bool) -> None:
        super().__init__()
        self.use = use
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.use else layer(x))
        return x


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_checkpointing_saves_fewer_bytes_and_gives_equal_gradients(compiler: str) -> None:
    x, saved, grads = torch.randn(16, 8), [], []
    for use in (False, True):
        torch.manual_seed(0)
        model = TwoLayers(use)
        chain = training_chain(model, (x,), compiler)
        saved.append(chain.split.saved_bytes)
        _, out = chain.fn(chain.state, chain.fn.params, x)
        weighted_loss(out).backward()
        grads.append({name: one.grad for name, one in model.named_parameters()})
    assert 0 < saved[1] < 0.5 * saved[0]
    assert_same(grads[0], grads[1], rtol=1e-5, atol=1e-6)


def test_a_users_own_partition_is_used() -> None:
    from torch._functorch.partitioners import default_partition

    def keep_everything(gm: Any, primals: Any, tangents: Any, num_forward: int) -> Any:
        return default_partition(gm, [*primals, *tangents], num_fwd_outputs=num_forward)

    model, inputs = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.GELU()), (torch.randn(4, 3),)
    state, captured = sf.stages.capture(sf.init_state(), model, inputs)
    state, joint = sf.stages.lower_training(state, captured)
    before = str(joint.graph)
    state, all_saved = sf.stages.partition(state, joint, keep_everything)
    state, few_saved = sf.stages.partition(state, joint)
    assert str(joint.graph) == before
    assert all_saved.saved_bytes >= few_saved.saved_bytes
    state, forward = sf.stages.compile_forward(state, all_saved)
    state, backward = sf.stages.compile_backward(state, all_saved)
    state, fn = sf.stages.assemble_training(state, captured, all_saved, forward, backward)
    weighted_loss(fn(state, fn.params, *inputs)[1]).backward()
    ours = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    weighted_loss(model(*inputs)).backward()
    assert_same(ours, [one.grad for one in model.parameters()], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("grad", [True, False])
def test_a_backend_of_the_users_own_sees_each_graph_once(grad: bool) -> None:
    seen: list[tuple[int, int]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        placeholders = gm.graph.find_nodes(op="placeholder")
        seen.append((len(placeholders), len(example_inputs)))
        assert [tuple(one.shape) for one in example_inputs] == [tuple(node.meta["val"].shape) for node in placeholders]
        return gm.forward

    model, inputs = MODELS["convolution"]()
    with torch.set_grad_enabled(grad):
        state, fn = compiled(model, inputs, backend=backend)
        _, out = fn(state, fn.params, *inputs)
        assert_same(out, copy.deepcopy(model)(*inputs), rtol=1e-5, atol=1e-5)
    assert len(seen) == (2 if grad else 1)
    assert all(count == given for count, given in seen)
    if grad:
        out.sum().backward()
        assert len(seen) == 2, "the backward is compiled with the forward, not later"
