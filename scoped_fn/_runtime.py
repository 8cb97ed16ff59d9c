"""The only place with effects: runs compiled code, remembers it, counts.

Nothing here outlives the compiled function that owns it, except through a pending backward, which keeps what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from scoped_fn._backends import Code
from scoped_fn._specs import TensorSpec, matches
from scoped_fn._structure import Structure
from scoped_fn._torch import compile_lock, disable_autocast, is_any_autocast_enabled

Launch = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class CacheInfo(NamedTuple):
    """What a compiled function did so far.

    Attributes:
        captures: How often the model was captured: once for each new kind of call.
        compiled_graphs: How many graphs were compiled.
        compiled_calls: How often compiled code was launched, forward or backward.
        eager_calls: How often something ran eager because it could not be compiled.
    """

    captures: int
    compiled_graphs: int
    compiled_calls: int
    eager_calls: int


@dataclass(frozen=True, eq=False)
class Variant:
    """Compiled code for one kind of call.

    Attributes:
        kind: "training", "inference", or what else asked for it.
        ambient: The torch settings it was captured under.
        structure: Structure of the arguments.
        specs: Specs of parameters, buffers and inputs.
        need_grad: Whether `requires_grad` of the arguments matters.
        launch: Runs the code.
        finish: (results, arguments) -> the structured value that the caller gets.
        num_outputs: How many results are the model's own outputs; the new buffers follow.
        new_buffers: Names of the buffers that come back.
    """

    kind: Any
    ambient: tuple[Any, ...]
    structure: Structure
    specs: tuple[TensorSpec, ...]
    need_grad: bool
    launch: Launch
    finish: Callable[[Sequence[torch.Tensor], list[torch.Tensor]], Any]
    num_outputs: int
    new_buffers: tuple[str, ...]


class Memo:
    """The variants of one compiled function and its counters. Thread-safe."""

    def __init__(self) -> None:
        self.variants: tuple[Variant, ...] = ()
        self.structures: dict[int, Structure] = {}
        self.captures = self.compiled_graphs = self.compiled_calls = self.eager_calls = 0

    def find(
        self, kind: Any, ambient: tuple[Any, ...], structure: Structure, tensors: list[torch.Tensor]
    ) -> Variant | None:
        """Returns the variant for a call, if there is one."""
        for variant in self.variants:
            if (
                variant.kind == kind
                and variant.ambient == ambient
                and (variant.structure is structure or variant.structure == structure)
                and matches(variant.specs, tensors, variant.need_grad)
            ):
                return variant
        return None

    def find_or_make(
        self,
        kind: Any,
        structure: Structure,
        tensors: list[torch.Tensor],
        make: Callable[[], Variant],
    ) -> Variant:
        """Returns the variant for a call; makes it once, whatever the number of threads that ask."""
        ambient = ambient_settings(kind)
        found = self.find(kind, ambient, structure, tensors)
        if found is None:
            with compile_lock:
                found = self.find(kind, ambient, structure, tensors)
                if found is None:
                    found = make()
                    self.variants = (*self.variants, found)
        return found

    def info(self) -> CacheInfo:
        """Returns the counters."""
        return CacheInfo(self.captures, self.compiled_graphs, self.compiled_calls, self.eager_calls)


def ambient_settings(kind: Any) -> tuple[Any, ...]:
    """Returns the torch settings of this thread that change what a model computes in a call of this kind."""
    grad = torch.is_grad_enabled() if kind == "inference" else True
    if not is_any_autocast_enabled():
        return torch.get_default_dtype(), grad
    devices = [d for d in ("cpu", "cuda", "xpu", "mps") if torch.is_autocast_enabled(d)]
    return torch.get_default_dtype(), grad, *((d, torch.get_autocast_dtype(d)) for d in devices)


def launch_code(memo: Memo, code: Code, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Runs compiled code. Casts are already in the graph, so autocast must not act on it again."""
    memo.compiled_calls += 1
    if torch.is_inference_mode_enabled():  # its tensors could not be saved for a backward, and may go into a state
        with torch.inference_mode(False), torch.no_grad():
            return launch_code(memo, code, tensors)
    if is_any_autocast_enabled():
        with disable_autocast():
            return code(tensors)
    return code(tensors)


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
        forward: Inputs and constants -> outputs, new buffers, saved tensors.
        backwards: Saved tensors and tangents -> gradients.
        constants: Tensors that go between buffers and inputs.
        at: Where the constants go.
        num_forward: How many results of `forward` are not saved tensors.
        plain_outputs: Indices of the results that carry no gradient.
        tangents: For each tangent, the result it belongs to and the spec that the backward was compiled for.
        restrided: Saved values that the backward takes with other strides than the forward gives, and those strides.
        watched: Arguments and results whose memory a saved tensor shares: they are saved too, so that autograd notices
            if they are changed in place before the backward.
    """

    memo: Memo
    forward: Code
    backwards: Backwards
    constants: tuple[torch.Tensor, ...]
    at: int
    num_forward: int
    plain_outputs: tuple[int, ...]
    tangents: tuple[tuple[int, TensorSpec], ...]
    restrided: tuple[tuple[int, tuple[int, ...]], ...]
    watched: tuple[tuple[int, ...], tuple[int, ...]]

    def launch(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the forward and hangs the backward on its outputs."""
        results: Sequence[torch.Tensor] = _Differentiable.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return results


class _Differentiable(torch.autograd.Function):
    """One node in torch's autograd graph: compiled forward, compiled backward."""

    @staticmethod
    def forward(ctx: Any, training: TrainingCode, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = [*tensors[: training.at], *training.constants, *tensors[training.at :]]
        results = launch_code(training.memo, training.forward, flat)
        outputs, saved = tuple(results[: training.num_forward]), results[training.num_forward :]
        arguments, own = training.watched
        ctx.save_for_backward(*saved, *(tensors[i] for i in arguments), *(outputs[i] for i in own))
        ctx.training, ctx.num_tensors, ctx.num_saved = training, len(tensors), len(saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(outputs[i] for i in training.plain_outputs))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        training: TrainingCode = ctx.training
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "Expected a first derivative of a compiled function, got a request for a second (create_graph=True). "
                "Compile the function that takes the derivative, or differentiate the model itself."
            )
        unused = frozenset(n for n, (i, _) in enumerate(training.tangents) if cotangents[i] is None)
        backward, places = training.backwards.without(unused)
        tangents = [_tangent(given, spec) for i, spec in training.tangents if (given := cotangents[i]) is not None]
        saved = list(ctx.saved_tensors[: ctx.num_saved])
        for i, stride in training.restrided:
            saved[i] = _with_stride(saved[i], stride)
        grads = launch_code(training.memo, backward, [*saved, *tangents])
        result: list[torch.Tensor | None] = [None] * ctx.num_tensors
        for i, grad in zip(places, grads, strict=True):
            result[i] = grad
        return (None, *result)


def _tangent(cotangent: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns the cotangent in the memory layout that the backward was compiled for."""
    cotangent = cotangent.resolve_conj().resolve_neg()
    return cotangent if cotangent.stride() == spec.stride else _with_stride(cotangent, spec.stride)


def _with_stride(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


__all__ = ["Backwards", "CacheInfo", "Memo", "TrainingCode", "Variant", "ambient_settings", "launch_code"]
