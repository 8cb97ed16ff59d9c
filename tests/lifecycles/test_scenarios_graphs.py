"""Operations with several results and parameters that nobody uses, through every stage and every kind of pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scoped_fn as sf
from tests.helpers import assert_same, fresh

pytestmark = pytest.mark.usefixtures("one_thread")


class Several(nn.Module):
    """Results that come in tuples, some of them used twice and some never, and a parameter without use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.unused, self.idle = nn.Parameter(torch.ones(3)), nn.Linear(2, 2)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.count.add_(1)
        hidden = self.norm(self.linear(x))
        values, indices = hidden.topk(3, dim=1)
        variance, mean = torch.var_mean(hidden, dim=0)
        left, _, right = hidden.split(2, dim=1)
        largest, _ = hidden.max(dim=1)
        order = hidden.sort(dim=0)
        loss = (
            values.sum() + (variance * mean).sum() + (left * right).sum() + largest.prod() + order.values[0].sum()
        ).tanh()
        return loss, {"indices": indices, "mean": mean, "order": order.indices}


def made() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(3)
    return Several(), (torch.randn(5, 6),)


def lint(*graphs: sf.Graph | None) -> int:
    """Checks each graph; returns how many there are."""
    present = [graph for graph in graphs if graph is not None]
    for graph in present:
        graph.gm.graph.lint()
        named = {node.name for node in graph.gm.graph.nodes}
        assert len(named) == len(graph.gm.graph.nodes)
    return len(present)


# 13
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_each_stage_gives_a_valid_graph(compiler: str) -> None:
    model, inputs = made()
    state, captured = sf.stages.capture(sf.init_state(), model, inputs)
    assert lint(captured.graph) == 1
    state, joint = sf.stages.lower_training(state, captured, backend=compiler)
    assert lint(joint.graph) == 1
    state, split = sf.stages.partition(state, joint)
    assert lint(split.forward, split.backward) == 2
    state, forward = sf.stages.compile_forward(state, split, compiler)
    state, backward = sf.stages.compile_backward(state, split, compiler)
    assert lint(captured.graph, joint.graph, split.forward, split.backward) == 4, "compiling edits no graph"
    state, fn = sf.stages.assemble_training(state, captured, split, forward, backward)
    assert_equals_eager(state, fn, model, inputs, by_hand=True)


PASSES: dict[str, Any] = {
    "none": sf.Passes(),
    "budget 0": [sf.passes.memory_budget(0.0)],
    "budget 0.5": [sf.passes.memory_budget(0.5)],
    "order": [sf.passes.order_for_memory()],
    "offload": [sf.passes.offload_saved(2**30)],
    "all": [sf.passes.memory_budget(0.5), sf.passes.order_for_memory(), sf.passes.offload_saved(64)],
}


# 13
@pytest.mark.filterwarnings("ignore:Expected .*:UserWarning")  # a budget of nothing need not be met
@pytest.mark.parametrize("name", PASSES)
def test_each_guided_pass_gives_valid_graphs_that_equal_eager(name: str) -> None:
    model, inputs = made()
    state, fn = sf.compile(sf.init_state(), model, inputs, backend="eager", passes=PASSES[name])
    assert lint(fn.pristine.graph, fn.captured.graph, fn.joint_graph, fn.forward_graph, fn.backward_graph) == 5
    assert_equals_eager(state, fn, model, inputs)
    state, again = sf.recompile(state, fn)
    assert lint(again.captured.graph, again.joint_graph, again.forward_graph, again.backward_graph) == 4
    assert_equals_eager(state, again, model, inputs)


def assert_equals_eager(
    state: sf.CompilerState, fn: sf.CompiledFn, model: nn.Module, inputs: tuple[Tensor], *, by_hand: bool = False
) -> None:
    """Values, gradients and buffers are eager's, by plain autograd and by `value_and_grad`."""
    twin, params = copy.deepcopy(model), fresh(fn.params)
    loss, rest = twin(*inputs)
    loss.backward()
    after, (value, other) = fn(state, params, *inputs)
    value.backward()
    assert_same((value.detach(), other), (loss.detach(), rest), rtol=1e-5, atol=1e-6)
    grads = {name: own.grad for name, own in twin.named_parameters()}
    assert_same({name: own.grad for name, own in params.items()}, grads, rtol=1e-4, atol=1e-6)
    assert [name for name, grad in grads.items() if grad is None] == ["unused", "idle.weight", "idle.bias"]
    assert_same(dict(after.buffers[fn.owner]), dict(twin.named_buffers()))
    if by_hand:  # what is assembled stage by stage has one kind of call
        return
    _, ((whole, _), found) = sf.value_and_grad(fn, has_aux=True)(state, params, *inputs)
    assert_same(whole, loss.detach(), rtol=1e-5, atol=1e-6)
    filled = {name: torch.zeros_like(params[name]) if grad is None else grad for name, grad in grads.items()}
    assert_same(found, filled, rtol=1e-4, atol=1e-6)
