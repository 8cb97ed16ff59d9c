"""FP8 autocast on a CPU: the step of the demo model, the work on scales, what a block saves, how often it quantizes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import scoped_fn as sf
from scoped_fn._fp8.scales import updated
from scoped_fn._fp8.shared_quantizations import QUANTIZE
from scoped_fn._graph import output_values
from scoped_fn.demo.gpt import GPT, Block, GPTConfig
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.text import read_corpus
from scoped_fn.demo.train import first_batch
from scoped_fn.state.fp8_state import init_fp8, stage_amax, stage_gradients
from tests.bench.measure import Row, medians_us, print_table

SITES = 100
NO_BAR = float("inf")


def rows() -> list[Row]:
    return [*_steps(), *_saved(), *_quantizations()]


def _steps() -> list[Row]:
    options = TrainOptions()
    batch = first_batch(options, read_corpus(None, context=options.model.context))
    recipes = {"float32": None, "delayed": sf.DelayedScaling(), "current": sf.Float8CurrentScaling()}
    steps = {name: _scoped(recipe, batch) for name, recipe in recipes.items()}
    steps |= {"torchao": _torchao(batch), "scales": _work_on_scales()}
    times = medians_us(steps, rounds=25)
    demo, torchao = "step of the demo model", "torchao float8, emulated, torch.compile"
    return [
        _row(f"{demo}, FP8 delayed", torchao, times["delayed"], times["torchao"], 1.0),
        _row(f"{demo}, FP8 current", torchao, times["current"], times["torchao"], NO_BAR),
        _row(f"{demo}, FP8 delayed", "float32", times["delayed"], times["float32"], NO_BAR),
        _row(f"amaxes and scales of {SITES} sites", f"{demo}, FP8 delayed", times["scales"], times["delayed"], 0.03),
    ]


def _work_on_scales() -> Callable[[], object]:
    columns = [(f"layers.{i}", role) for i in range(SITES) for role in ("input", "weight", "grad_output")]
    held, amax, of_sinks = init_fp8(columns, sf.DelayedScaling()), torch.rand(3 * SITES), torch.rand(SITES)
    return lambda: updated(stage_gradients(stage_amax(held, amax), of_sinks))


def _scoped(recipe: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], object]:
    # The layers that torchao converts: the product with the token embedding is none.
    state = sf.init_state() if recipe is None else sf.autocast(sf.init_state(), recipe, skip=("token_embedding",))
    state, fn = sf.compile(state, GPT(GPTConfig(), seed=0), batch)
    step = sf.value_and_grad(fn)
    params = {name: value.detach() for name, value in fn.params.items()}
    state, _ = step(state, params, *batch)
    return lambda: step(state, params, *batch)


def _torchao(batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], object]:
    # Not among the pins: install it by hand to run this benchmark (pip install torchao).
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = convert_to_float8_training(GPT(GPTConfig(), seed=0), config=Float8LinearConfig(emulate=True))
    compiled = torch.compile(model)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(*batch).backward()

    return step


def _saved() -> list[Row]:
    made = []
    for width in (128, 512):
        splits = [_split(width, recipe) for recipe in (sf.DelayedScaling(), None)]
        what = f"that a block of width {width} saves, bfloat16 model, FP8 delayed"
        for unit, count, bar in (("tensors", _tensor_bytes, 0.6), ("memory", lambda split: split.saved_bytes, NO_BAR)):
            ours, theirs = map(count, splits)
            made.append(
                Row(f"bytes of the {unit} {what}", "without FP8", f"{ours:,}", f"{theirs:,}", ours / theirs, bar)
            )
    return made


def _tensor_bytes(split: Any) -> int:
    """Bytes of the saved tensors one by one, views of parameters among them."""
    kept = output_values(split.forward.gm)[split.joint.num_forward :]
    values = [node.meta["val"] for node in kept if node.op != "placeholder"]
    return sum(value.numel() * value.element_size() for value in values)


def _split(width: int, recipe: Any) -> Any:
    state = sf.init_state() if recipe is None else sf.autocast(sf.init_state(), recipe)
    x = torch.randn(8, 256, width, dtype=torch.bfloat16, requires_grad=True)
    state, captured = sf.stages.capture(state, Block(width).bfloat16(), (x,))
    state, captured = sf.stages.autocast(state, captured)
    state, joint = sf.stages.lower_training(state, captured, backend="inductor")
    return sf.stages.partition(state, joint)[1]


def _quantizations() -> list[Row]:
    made = []
    for recipe in (sf.DelayedScaling(), sf.Float8CurrentScaling(), sf.MXFP8BlockScaling()):
        graph = _split(128, recipe).joint.graph.gm.graph
        count = sum(node.target in QUANTIZE for node in graph.nodes) / 4
        what = f"quantizations of a linear in a training step, {type(recipe).__name__}"
        made.append(Row(what, "count", f"{count:.2f}", "3", count, 3))
    return made


def _row(what: str, baseline: str, ours: float, theirs: float, bar: float) -> Row:
    return Row(what, baseline, f"{ours / 1000:.2f} ms", f"{theirs / 1000:.2f} ms", ours / theirs, bar)


if __name__ == "__main__":
    sys.exit(0 if print_table(rows()) else 1)
