"""The models that the stage tests run through the pipeline, and the pipeline itself, written out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import scoped_fn as sf


class DictToTuple(nn.Module):
    """A dictionary in, a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        hidden = self.linear(batch["x"]).tanh()
        return hidden, {"error": (hidden - batch["y"]).abs().sum(), "rows": len(batch["x"])}


def linear() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), (torch.randn(4, 3),)


def convolution() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()), (torch.randn(2, 2, 5, 5),)


def dictionary() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return DictToTuple(), ({"x": torch.randn(4, 3), "y": torch.zeros(4, 2)},)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "linear": linear,
    "convolution": convolution,
    "dictionary": dictionary,
}


@dataclass(frozen=True)
class Chain:
    """Every artifact of one run of the pipeline."""

    state: Any
    captured: Any
    joint: Any = None
    split: Any = None
    forward: Any = None
    backward: Any = None
    inference: Any = None
    compiled: Any = None
    fn: Any = None


def training_chain(model: nn.Module, inputs: tuple[Any, ...], compiler: str = "eager") -> Chain:
    """`compile`, stage by stage, for training."""
    state, captured = sf.stages.capture(sf.init_state(), model, inputs)
    state, joint = sf.stages.lower_training(state, captured, backend=compiler)
    state, split = sf.stages.partition(state, joint)
    state, forward = sf.stages.compile_forward(state, split, compiler)
    state, backward = sf.stages.compile_backward(state, split, compiler)
    state, fn = sf.stages.assemble_training(state, captured, split, forward, backward)
    return Chain(state, captured, joint=joint, split=split, forward=forward, backward=backward, fn=fn)


def inference_chain(model: nn.Module, inputs: tuple[Any, ...], compiler: str = "eager") -> Chain:
    """`compile`, stage by stage, for inference."""
    with torch.no_grad():
        state, captured = sf.stages.capture(sf.init_state(), model, inputs)
        state, inference = sf.stages.lower_inference(state, captured, backend=compiler)
        state, compiled = sf.stages.compile_inference(state, inference, compiler)
        state, fn = sf.stages.assemble_inference(state, captured, inference, compiled)
    return Chain(state, captured, inference=inference, compiled=compiled, fn=fn)


def texts(chain: Chain) -> dict[str, str]:
    """The text of each graph of a chain."""
    graphs = {
        "captured": chain.captured.graph,
        "joint": chain.joint and chain.joint.graph,
        "forward": chain.split and chain.split.forward,
        "backward": chain.split and chain.split.backward,
        "inference": chain.inference and chain.inference.graph,
    }
    return {name: str(graph) for name, graph in graphs.items() if graph is not None}


def replacing(old: float, new: float) -> Callable[[torch.fx.GraphModule], torch.fx.GraphModule]:
    """A pass that puts one constant for another, on a copy of the graph."""

    def replace_constant(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        copied = copy.deepcopy(gm)
        for node in copied.graph.nodes:
            node.args = tuple(new if type(one) is float and one == old else one for one in node.args)
        copied.recompile()
        return copied

    return replace_constant
