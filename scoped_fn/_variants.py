"""Artifacts to `Variant`s: what `CompiledFn` keeps for each kind of call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from scoped_fn._backends import Code, Strides
from scoped_fn._graph import fake_inputs, output_values
from scoped_fn._runtime import Backwards, Launch, Memo, TrainingCode, Variant, ambient_settings, launch_code
from scoped_fn._specs import TensorSpec
from scoped_fn._structure import unflatten
from scoped_fn._torch import storage_id
from scoped_fn._unused_outputs import without_tangents
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.compile_graph import Compiled
from scoped_fn.stages.lower import Inference, Joint
from scoped_fn.stages.partition import Split

Finish = Callable[[Sequence[torch.Tensor], list[torch.Tensor]], Any]


def inference_variant(kind: str, inference: Inference, compiled: Compiled, memo: Memo) -> Variant:
    """Returns the variant that computes outputs and new buffers."""
    captured = inference.captured
    return whole_variant(kind, captured, compiled, inference.new_buffers, memo, finish_outputs(captured))


def whole_variant(
    kind: Any, captured: Captured, compiled: Compiled, new_buffers: tuple[str, ...], memo: Memo, finish: Finish
) -> Variant:
    """Returns the variant that runs one graph of the captured placeholders."""
    constants, at, code = list(captured.constants), captured.num_held - len(captured.constants), compiled.code

    def launch(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return launch_code(memo, code, [*tensors[:at], *constants, *tensors[at:]])

    def launch_apart(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():  # something requires a gradient, but no output depends on it
            return launch(tensors)

    return _variant(kind, captured, launch_apart if kind == "training" else launch, finish, new_buffers)


def training_variant(split: Split, forward: Compiled, backward: Compiled, memo: Memo) -> Variant:
    """Returns the variant whose outputs carry gradients."""
    joint, captured = split.joint, split.joint.captured
    specs = dict(zip(joint.tangents, _tangent_specs(joint), strict=True))
    at = captured.num_held - len(captured.constants)
    places = tuple(i if i < at else i - len(captured.constants) for i in joint.grads)

    def partial(unused: frozenset[int]) -> tuple[Code, tuple[int, ...]]:
        graph, left = without_tangents(split.backward, len(split.saved), unused)
        memo.compiled_graphs += 1
        return backward.again(graph).code, tuple(places[i] for i in left)

    training = TrainingCode(
        memo=memo,
        forward=forward.code,
        backwards=Backwards((backward.code, places), partial),
        constants=captured.constants,
        at=at,
        num_forward=joint.num_forward,
        plain_outputs=tuple(i for i in range(joint.num_forward) if i not in specs),
        tangents=tuple(specs.items()),
        restrided=_restrided(split, forward, backward),
        watched=_watched(split, at, len(captured.constants)),
    )
    return _variant("training", captured, training.launch, finish_outputs(captured), joint.new_buffers)


def _restrided(split: Split, forward: Compiled, backward: Compiled) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Returns which saved values the backward expects with other strides than the forward gives, and those strides."""
    own = [node.meta["val"].stride() for node in split.backward.gm.graph.find_nodes(op="placeholder")]
    own = own[: len(split.saved)]
    given = _known(forward.output_strides[split.joint.num_forward :], own)
    taken = _known(backward.input_strides, own)
    return tuple((i, stride) for i, (stride, other) in enumerate(zip(taken, given, strict=True)) if stride != other)


def _known(strides: Strides, own: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    padded = [*strides, *[None] * (len(own) - len(strides))]
    return [stride if stride is not None else mine for stride, mine in zip(padded, own, strict=True)]


def _watched(split: Split, at: int, num_constants: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the arguments and the results that share memory with a saved tensor without being it.

    Autograd notices when a saved tensor is changed in place before the backward, but compiled code may save a view of
    an argument or result that autograd does not know to be one.
    """
    values = output_values(split.forward.gm)
    results, saved = values[: split.joint.num_forward], values[split.joint.num_forward :]
    memory = {storage_id(node.meta["val"]) for node in saved if node.op != "placeholder"}
    arguments = split.forward.gm.graph.find_nodes(op="placeholder")
    del arguments[at : at + num_constants]
    return tuple(
        tuple(i for i, node in enumerate(nodes) if node not in saved and storage_id(node.meta["val"]) in memory)
        for nodes in (arguments, results)
    )  # type: ignore[return-value]


def finish_outputs(captured: Captured) -> Finish:
    """Returns the function that puts the model's outputs back into their structure."""
    structure, count = captured.out_structure, captured.num_outputs
    if structure.leaves == (None,) and structure.spec.is_leaf():
        return lambda results, tensors: results[0]
    return lambda results, tensors: unflatten(structure, list(results[:count]))


def _variant(kind: Any, captured: Captured, launch: Launch, finish: Finish, new_buffers: tuple[str, ...]) -> Variant:
    start = captured.num_held - len(captured.constants)
    return Variant(
        kind=kind,
        ambient=ambient_settings(kind),
        structure=captured.in_structure,
        specs=(*captured.specs[:start], *captured.specs[captured.num_held :]),
        need_grad=kind == "training",
        launch=launch,
        finish=finish,
        num_outputs=captured.num_outputs,
        new_buffers=new_buffers,
    )


def _tangent_specs(joint: Joint) -> list[TensorSpec]:
    """Returns the spec that the backward expects of each tangent."""
    fakes = fake_inputs(joint.graph.gm)[joint.num_primals :]
    return [TensorSpec(fake.shape, fake.stride(), fake.dtype, fake.device, False) for fake in fakes]
