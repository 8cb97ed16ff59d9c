"""Compiled forward and backward of the captured graph, as plain autograd and one grad level run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from scoped_fn._backends import Code, Strides
from scoped_fn._chain import Training
from scoped_fn._graph import fake_inputs, output_values
from scoped_fn._runtime import Memo, launch_code
from scoped_fn._specs import TensorSpec, with_stride
from scoped_fn._torch.dynamo import compile_lock
from scoped_fn._torch.tensors import storage_id
from scoped_fn._unused_outputs import without_tangents
from scoped_fn.stages.compile_graph import Compiled
from scoped_fn.stages.lower import Joint
from scoped_fn.stages.partition import Split

Tensors = Sequence[torch.Tensor]


class Backwards:
    """Backward code: for all tangents at once, and made when first needed, for losses that use only some outputs."""

    def __init__(
        self, full: tuple[Code, tuple[int, ...]], make: Callable[[frozenset[int]], tuple[Code, tuple[int, ...]]]
    ) -> None:
        self._made = {frozenset[int](): full}
        self._make = make

    def without(self, unused: frozenset[int]) -> tuple[Code, tuple[int, ...]]:
        """Returns code that takes the tangents that are not `unused`, and the arguments its gradients belong to."""
        if unused not in self._made:
            with compile_lock:
                if unused not in self._made:
                    self._made[unused] = self._make(unused)
        return self._made[unused]


@dataclass(frozen=True, eq=False)
class TrainingCode:
    """Forward and backward code, and how they fit together.

    Attributes:
        memo: Where calls are counted.
        forward: The captured placeholders -> outputs, new buffers, saved tensors.
        backwards: Saved tensors and tangents -> gradients.
        num_arguments: How many tensors `forward` takes.
        num_forward: How many results of `forward` are not saved tensors.
        num_saved: How many are.
        tangents: For each tangent, the result it belongs to and the spec that the backward was compiled for.
        restrided: Saved values that the backward takes with other strides than the forward gives, and those strides.
        watched: Arguments and results whose memory a saved tensor shares: they are saved too, so that autograd notices
            if they are changed in place before the backward.
    """

    memo: Memo
    forward: Code
    backwards: Backwards
    num_arguments: int
    num_forward: int
    num_saved: int
    tangents: tuple[tuple[int, TensorSpec], ...]
    restrided: tuple[tuple[int, tuple[int, ...]], ...]
    watched: tuple[tuple[int, ...], tuple[int, ...]]

    def run_forward(self, tensors: list[torch.Tensor]) -> Tensors:
        """Returns outputs, new buffers and saved tensors."""
        return launch_code(self.memo, self.forward, tensors)

    def run_backward(self, code: Code, tensors: list[torch.Tensor], given: Sequence[int]) -> Tensors:
        """Returns gradients from saved tensors and the `given` tangents."""
        for i, stride in self.restrided:
            tensors[i] = with_stride(tensors[i], stride)
        for at, n in enumerate(given, start=self.num_saved):
            tensors[at] = self.tangents[n][1].fit(tensors[at])
        return launch_code(self.memo, code, tensors)

    def watch(self, arguments: Tensors, results: Tensors) -> Tensors:
        """Returns the tensors to watch."""
        return [*(arguments[i] for i in self.watched[0]), *(results[i] for i in self.watched[1])]


def training_code(training: Training, memo: Memo) -> TrainingCode:
    """Returns the code of a compiled training call."""
    split, forward, backward = training.split, training.forward, training.backward
    joint = split.joint

    def partial(unused: frozenset[int]) -> tuple[Code, tuple[int, ...]]:
        graph, left = without_tangents(split.backward, len(split.saved), unused)
        memo.compiled_graphs += 1
        return backward.again(graph).code, tuple(joint.grads[i] for i in left)

    return TrainingCode(
        memo=memo,
        forward=forward.code,
        backwards=Backwards((backward.code, joint.grads), partial),
        num_arguments=joint.num_primals,
        num_forward=joint.num_forward,
        num_saved=len(split.saved),
        tangents=tuple(zip(joint.tangents, _tangent_specs(joint), strict=True)),
        restrided=_restrided(split, forward, backward),
        watched=_watched(split),
    )


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


def _watched(split: Split) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the arguments and the results that share memory with a saved tensor without being it.

    Autograd notices when a saved tensor is changed in place before the backward, but compiled code may save a view of
    an argument or result that autograd does not know to be one.
    """
    values = output_values(split.forward.gm)
    results, saved = values[: split.joint.num_forward], values[split.joint.num_forward :]
    memory = {storage_id(node.meta["val"]) for node in saved if node.op != "placeholder"}
    arguments = split.forward.gm.graph.find_nodes(op="placeholder")
    return tuple(
        tuple(i for i, node in enumerate(nodes) if node not in saved and storage_id(node.meta["val"]) in memory)
        for nodes in (arguments, results)
    )  # type: ignore[return-value]


def _tangent_specs(joint: Joint) -> list[TensorSpec]:
    """Returns the spec that the backward expects of each tangent."""
    fakes = fake_inputs(joint.graph.gm)[joint.num_primals :]
    return [TensorSpec(fake.shape, fake.stride(), fake.dtype, fake.device, False) for fake in fakes]
