"""FP8 autocast on a CPU: the step of the demo model, the work on scales, what a block saves, how often it quantizes."""

from __future__ import annotations

import sys
from typing import Any

import torch

import scoped_fn as sf
from scoped_fn._shared_quantizations import QUANTIZE
from scoped_fn.demo.gpt import GPT, Block, GPTConfig
from scoped_fn.demo.train import first_batch
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.text import read_corpus
from tests.bench.measure import Row, medians_us, print_table

SITES = 100
NO_BAR = float("inf")


def rows() -> list[Row]:
    return [*_steps(), *_saved(), *_quantizations()]


def _steps() -> list[Row]:
    options = TrainOptions()
    batch = first_batch(options, read_corpus(None, context=options.model.context))
    steps: dict[str, Any] = {"float32": _scoped(None, batch), "delayed": _scoped(sf.DelayedScaling(), batch)}
    steps["torchao"] = _torchao(batch)
    steps["current"] = _scoped(sf.Float8CurrentScaling(), batch)
    held = sf.init_state()
    columns = [(f"layers.{i}", role) for i in range(SITES) for role in ("input", "weight", "grad_output")]
    from scoped_fn._scales import updated
    from scoped_fn.state.fp8_state import init_fp8, stage_amax, stage_gradients

    scales, amax, sinks = init_fp8(columns, sf.DelayedScaling()), torch.rand(3 * SITES), torch.rand(SITES)
    steps["scales"] = lambda: updated(stage_gradients(stage_amax(scales, amax), sinks))
    times = medians_us(steps, rounds=15)
    return [
        _row("step of the demo model, FP8 delayed", "torchao float8, emulated, torch.compile", times, "delayed", "torchao", 1.0),
        _row("step of the demo model, FP8 delayed", "float32", times, "delayed", "float32", NO_BAR),
        _row("step of the demo model, FP8 current", "torchao float8, emulated, torch.compile", times, "current", "torchao", NO_BAR),
        _row(f"amaxes and scales of {SITES} sites, each step", "step of the demo model, FP8 delayed", times, "scales", "delayed", 0.03),
    ]


def _scoped(recipe: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    state = sf.init_state() if recipe is None else sf.autocast(sf.init_state(), recipe)
    state, fn = sf.compile(state, GPT(GPTConfig(), seed=0), batch)
    step = sf.value_and_grad(fn)
    params = {name: value.detach() for name, value in fn.params.items()}
    state, _ = step(state, params, *batch)
    return lambda: step(state, params, *batch)


def _torchao(batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = convert_to_float8_training(GPT(GPTConfig(), seed=0), config=Float8LinearConfig(emulate=True))
    compiled = torch.compile(model)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(*batch).backward()

    step()
    return step
