"""What is in the graphs: how often tensors are quantized, what is saved, and what is not computed at all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import scoped_fn as sf
from tests.fp8.networks import Block, Loss, Projections, Twice, batches, loss_of, mlp
from tests.fp8.scoped import KINDS, Run, example, recipe, scoped
from tests.helpers import compiled

pytestmark = pytest.mark.usefixtures("one_thread")


def calls(gm: GraphModule, word: str) -> list[Node]:
    """The calls of our operators whose name begins with a word."""
    return [node for node in gm.graph.nodes if str(node.target).startswith(f"scoped_fn.{word}")]


def counted(run: Run, word: str) -> tuple[int, int, int]:
    """How many there are in the joint, forward and backward graph of training."""
    graphs = (run.fn.joint_graph, run.fn.forward_graph, run.fn.backward_graph)
    return tuple(len(calls(graph.gm, word)) for graph in graphs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "layers"), [("mlp", 2), ("block", 4)])
def test_each_layer_quantizes_three_tensors(name: str, layers: int, kind: str) -> None:
    run, _ = example(kind, name)
    assert len(run.fn.sites) == layers
    joint, forward, backward = counted(run, "quantize")
    assert (joint, forward) == (3 * layers, 2 * layers)
    assert layers <= backward < 2 * layers, "codes of an activation may be made again from what is saved anyway"


@pytest.mark.parametrize("kind", ["delayed", "current", "block"])
def test_each_layer_multiplies_three_times(kind: str) -> None:
    run, _ = example(kind, "block")
    assert counted(run, "scaled_mm") == (12, 4, 8)
    run, _ = example(kind)
    assert counted(run, "scaled_mm") == (5, 2, 3), "no gradient of the input"


def test_inference_quantizes_two_tensors() -> None:
    data = batches("mlp", 1)
    with torch.no_grad():
        run = scoped(loss_of("mlp"), data[0])
    assert run.fn.joint_graph is None
    quantized = calls(run.fn.forward_graph.gm, "quantize")
    assert len(quantized) == 4
    assert not any(transposes(node) for node in quantized)


def transposes(node: Node) -> bool:
    """Whether a quantization gives the transposed copy too: it is the last argument of the operator."""
    return bool(node.kwargs.get("transpose", node.args[-1]))


@pytest.mark.parametrize("kind", ["delayed", "current", "block"])
def test_a_frozen_weight_has_no_gradient_product_and_no_operand_for_it(kind: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.randn(6, 8)
    model[1].requires_grad_(False)
    run = scoped(model, (x,), kind)
    assert counted(run, "scaled_mm") == (4, 2, 2)  # y twice, dx of the second, dw of the first
    forward, backward = (calls(graph.gm, "quantize") for graph in (run.fn.forward_graph, run.fn.backward_graph))
    assert len(forward) == 4
    assert len(backward) == 2
    by_shape = Counter((shape(node), transposes(node)) for node in [*forward, *backward])
    copies = kind == "block"  # whose blocks run along rows; codes with one scale are transposed by a view on a CPU
    assert by_shape[(6, 4), False] == 1, "the gradient at the frozen layer"
    assert by_shape[(16, 8), False] == 1, "the weight of the other layer: nobody wants the gradient of x"
    assert by_shape[(6, 16), False] == (1 if copies else 2), "the input of the frozen layer"
    assert by_shape[(6, 8), copies] == 1, "the input of the other layer"


def shape(node: Node) -> tuple[int, ...]:
    """The matrix that is quantized."""
    return tuple(node.args[0].meta["val"].shape[-2:])


@pytest.mark.parametrize("kind", ["current", "block", "mx"])
def test_projections_of_one_input_share_its_quantization(kind: str) -> None:
    run = scoped(Loss(Projections()), (torch.randn(5, 8), torch.randn(5, 8)), kind)
    assert counted(run, "quantize")[:2] == (1 + 3 + 3, 1 + 3)


def test_a_layer_called_twice_quantizes_its_weight_once() -> None:
    run = scoped(Twice(), (torch.randn(5, 8),), "current")
    assert counted(run, "quantize")[1] == 3


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_linear_layers_save_codes_of_one_byte(kind: str) -> None:
    model, x = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 64)), torch.randn(128, 64)
    run = scoped(model, (x,), kind)
    activations, weights = 128 * (64 + 32 + 32), 32 * 32 + 32 * 64
    assert activations <= run.fn._split.saved_bytes <= activations + weights + 256, "codes, and their scales"


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_a_block_saves_much_less_than_in_bfloat16(kind: str) -> None:
    model, x = Block(64, 4, bias=False).bfloat16(), torch.randn(4, 64, 64).bfloat16()
    _, plain = compiled(model, (x,))
    run = scoped(model, (x,), kind)
    assert saved_tensor_bytes(run.fn) <= 0.7 * saved_tensor_bytes(plain)


def saved_tensor_bytes(fn: sf.CompiledFn) -> int:
    """The bytes of the saved tensors one by one, views of parameters among them."""
    assert fn._split is not None
    kept = fn._split.forward.gm.graph.output_node().args[0][fn._split.joint.num_forward :]
    return sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in kept if node.op != "placeholder")


def test_scales_and_amaxes_are_inputs_and_outputs_of_one_graph() -> None:
    run, _ = example()
    assert run.fn.cache_info().compiled_graphs == 2
    one, _ = example("current")
    assert len(run.fn.forward_graph.inputs) > len(one.fn.forward_graph.inputs)
    assert len(run.fn.forward_graph.outputs) > len(one.fn.forward_graph.outputs)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"skip": ("net.up",)}, {"net.qkv", "net.out", "net.down"}),
        ({"skip": ("up", "down")}, {"net.qkv", "net.out"}),
        ({"skip": ("net.*",)}, set()),
        ({"skip": ("*.o*", "qkv")}, {"net.up", "net.down"}),
        ({"enabled": False}, set()),
        ({}, {"net.qkv", "net.out", "net.up", "net.down"}),
    ],
    ids=str,
)
def test_what_is_kept_in_high_precision(options: dict[str, Any], layers: set[str]) -> None:
    run, _ = example("current", "block", **options)
    assert set(run.fn.sites) == layers
    assert counted(run, "quantize")[0] == 3 * len(layers)


def test_all_sites_are_products_of_two_activations_too() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.fc(x) @ x.mT).softmax(-1) @ x

    x = torch.randn(2, 5, 8)
    counts = {
        which: counted(scoped(Mixed(), (x,), "current", sites=which), "scaled_mm") for which in ("all", "parameters")
    }
    assert counts["parameters"] == (2, 1, 1)
    assert counts["all"][1] == 3
    assert len(scoped(Mixed(), (x,), "current", sites="all").fn.sites) == 3


def test_graphs_hold_no_recipe() -> None:
    run = scoped(mlp(), (torch.randn(3, 8),), recipe())
    for graph in (run.fn.joint_graph, run.fn.forward_graph, run.fn.backward_graph):
        assert "Scaling" not in str(graph)
        attributes = [node for node in graph.gm.graph.nodes if node.op == "get_attr"]
        assert not [
            node for node in attributes if isinstance(getattr(graph.gm, str(node.target), None), sf.DelayedScaling)
        ]
