"""Artifacts to `Variant`s: what `CompiledFn` keeps for each kind of call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from scoped_fn._chain import Training
from scoped_fn._compose import call, differentiable_call
from scoped_fn._fp8.inline import Inline
from scoped_fn._halves import code_halves
from scoped_fn._job import Job
from scoped_fn._root import Root
from scoped_fn._runtime import Launch, Memo, Variant, launch_code
from scoped_fn._structure import unflatten
from scoped_fn._training import TrainingCode, training_code
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.compile_graph import Compiled
from scoped_fn.stages.lower import Inference

Finish = Callable[[Sequence[torch.Tensor], list[torch.Tensor]], Any]


def inference_variant(kind: str, inference: Inference, compiled: Compiled, memo: Memo) -> Variant:
    """Returns the variant that computes outputs and new buffers."""
    captured = inference.captured
    keep_for_traces(captured, memo)
    return whole_variant(kind, captured, compiled, inference.new_buffers, memo, finish_outputs(captured))


def whole_variant(
    kind: Any, captured: Captured, compiled: Compiled, new_buffers: tuple[str, ...], memo: Memo, finish: Finish
) -> Variant:
    """Returns the variant that runs one graph of the captured placeholders."""
    code = compiled.code

    def launch(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return launch_code(memo, code, tensors)

    def launch_apart(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():  # something requires a gradient, but no output depends on it
            return launch(tensors)

    return _variant(kind, captured, launch_apart if kind == "training" else launch, finish, new_buffers)


def training_variant(training: Training, memo: Memo, root: Callable[[], Root]) -> Variant:
    """Returns the variant whose outputs carry gradients of any order.

    Args:
        training: The compiled pieces.
        memo: Where calls are counted.
        root: Returns what second derivatives are derived from, once they are asked for.
    """
    captured, code = training.split.joint.captured, training_code(training, memo)
    keep_for_traces(captured, memo)
    wanted = tuple(i for i, spec in enumerate(captured.specs) if spec.requires_grad)
    halves = code_halves(code, wanted)
    job = Job(root, len(captured.specs), captured.rng == "torch", halves.forward, halves)

    def launch(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return differentiable_call(job, tensors, wanted)

    new_buffers = training.split.joint.new_buffers
    return _variant("training", captured, launch, finish_outputs(captured), new_buffers, code, root)


def keep_for_traces(captured: Captured, memo: Memo, *, exact: bool = True) -> None:
    """Remembers that a graph takes a key or scales, and itself; `exact` if it computes what a call does."""
    if captured.keyed:
        memo.learn_key(captured.in_structure)
    if captured.rng == "key" or captured.fp8 is not None:
        memo.inlines = (*memo.inlines, Inline(captured, exact=exact))
    if captured.fp8 is not None:
        key, plain = captured.in_structure.scope, replace(captured.in_structure, scope=None)
        if not set(key.columns) <= set(memo.fp8_kind(plain, key._replace(columns=())).columns):
            memo.learn(plain, key._replace(columns=()), key.columns, captured.fp8.request)


def transform_variant(tracked: tuple[bool, ...], root: Root) -> Variant:
    """Returns the variant that takes tensors of any `torch.func` level; the `tracked` ones may be differentiated."""
    captured = root.captured

    def launch(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return call(root, tensors)

    made = _variant(("transform", tracked), captured, launch, finish_outputs(captured), root.new_buffers)
    plan = root.plan  # what passes on lowered graphs will read is known only once a derivative is asked for
    return replace(made, every=plan.settings.constants) if plan.passes.reads_constants_later else made


def finish_outputs(captured: Captured) -> Finish:
    """Returns the function that puts the model's outputs back into their structure."""
    structure, count = captured.out_structure, captured.num_outputs
    if structure.leaves == (None,) and structure.spec.is_leaf():
        return lambda results, tensors: results[0]
    return lambda results, tensors: unflatten(structure, list(results[:count]))


def _variant(
    kind: Any,
    captured: Captured,
    launch: Launch,
    finish: Finish,
    new_buffers: tuple[str, ...],
    training: TrainingCode | None = None,
    root: Callable[[], Root] | None = None,
) -> Variant:
    at = captured.num_held - len(captured.constants)
    return Variant(
        kind=kind,
        ambient=replace(captured.ambient, grad=captured.grad_mode or kind != "inference"),
        structure=captured.in_structure,
        specs=(*captured.specs[:at], *captured.specs[captured.num_held :]),
        need_grad=kind == "training",
        launch=_with_constants(launch, list(captured.constants), at),
        finish=finish,
        num_outputs=captured.num_outputs,
        new_buffers=new_buffers,
        training=training,
        root=root,
        facts=captured.facts,
    )


def _with_constants(launch: Launch, constants: list[torch.Tensor], at: int) -> Launch:
    """Returns the launch that takes parameters, buffers and inputs, and puts the constants between them."""
    return lambda tensors: launch([*tensors[:at], *constants, *tensors[at:]])
