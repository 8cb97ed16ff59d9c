"""One node in the autograd graph of one level: compiled forward, compiled backward, derivatives of any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from scoped_fn._halves import Halves, halves_of
from scoped_fn._job import Job, Results, Tensors
from scoped_fn._torch.levels import JVP, VMAP, Level, below
from scoped_fn._torch.nodes import SingleLevelFunction, graph_is_kept, is_last_backward, single_level_allowed
from scoped_fn._torch.tensors import versions
from scoped_fn._torch.wrapped import alive, is_at, is_dead, kinds_of_levels, unwrap, wrap
from scoped_fn._trace import NotDerivableError

Evaluate = Callable[[Job, Tensors], Results]


class Task:
    """One node's work: set up by the caller, filled in by the forward, read by the backward.

    Attributes:
        evaluate: Runs a job on tensors of any levels.
        job: The job that is peeled.
        level: The level of the node; None for plain autograd.
        wanted: Indices of the tensors that get gradients.
        halves: What computes gradients from saved tensors; None if nothing does.
        extras: The saved tensors.
        dual: For a node that computes tangents too: the task without them, which gives gradients that have tangents.
        dual_tensors: Its tensors.
    """

    def __init__(self, evaluate: Evaluate, job: Job, level: Level | None, wanted: tuple[int, ...]) -> None:
        self.evaluate, self.job, self.level, self.wanted = evaluate, job, level, wanted
        self.halves: Halves | None = job.halves
        self.extras: Tensors | None = None
        self.dual: Task | None = None
        self.dual_tensors: Tensors = ()

    def apply(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """Returns the results, hung into the graph of the level, and the saved tensors."""
        level = self.level
        if level is not None:  # a tensor of a lower level may have a tangent there, which is not this level's business
            tensors = [tensor if is_at(tensor, level) else wrap(tensor, level) for tensor in tensors]
        with single_level_allowed():
            results: Tensors = Node.apply(self, *tensors)  # type: ignore[attr-defined]
        extras, self.extras = self.extras, None  # from here on the node keeps them, and drops them after its backward
        return results, extras or ()

    def forward(self, tensors: Tensors) -> Tensors:
        """Returns the results, computed below the level."""
        job = self.job
        if job.value is None:
            kinds = kinds_of_levels(tensors)
            if JVP not in kinds:
                halves = self.halves = halves_of(job.pure(), self.wanted, batched=VMAP in kinds)
                job = Job(job.pure, job.count, job.random, halves.forward, halves)
        outs, self.extras = self.evaluate(job, tensors)
        if self.extras is None or self.halves is None or not set(self.wanted).issubset(self.halves.wanted):
            self.halves = None
        return outs

    def plain_results(self, outs: Tensors) -> Sequence[int]:
        """Returns the indices of the results that carry no gradient."""
        halves = self.halves or self.job.above
        if halves is not None:
            return halves.plain
        if self.job.value is not None:  # gradients, which depend on the cotangents in any case
            return ()
        pure, wanted = self.job.pure(), self.wanted
        kept = _or_else(lambda: pure.differentiable(wanted), range(len(outs)))
        return [i for i, o in enumerate(outs) if i not in kept or not (o.is_floating_point() or o.is_complex())]

    def gradient(self, cotangents: Sequence[torch.Tensor | None]) -> tuple[Job, Sequence[int], list[torch.Tensor]]:
        """Returns the job that computes gradients, the arguments these belong to, and the cotangents it takes."""
        job = self.job
        used = tuple(i for i, cotangent in enumerate(cotangents) if cotangent is not None)
        value = None
        if self.halves is not None:
            value, places = self.halves.backward(used, job.count)
        else:
            places = tuple(_or_else(lambda: job.pure().reached(self.wanted, used), self.wanted))
        pure = job.pure
        made = Job(lambda: pure().vjp(places, used), job.count + len(used), job.random, value)
        return made, places, [cotangent for cotangent in cotangents if cotangent is not None]


def _or_else(derive: Callable[[], Sequence[int]], fallback: Sequence[int]) -> Sequence[int]:
    try:
        return derive()
    except NotDerivableError:
        return fallback


class Node(SingleLevelFunction):
    """The node; its results are wrapped by the level."""

    @staticmethod
    def forward(ctx: Any, task: Task, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Computes below the level."""
        level = task.level
        with below(level, within=True):
            outs = task.forward([unwrap(tensor, level) for tensor in tensors])
        results = tuple([wrap(out, level) for out in outs])
        ctx.task, ctx.arguments, ctx.versions = task, tensors, versions(tensors)
        watched = task.halves.watched(tensors, results) if task.halves is not None and level is None else ()
        extras = task.extras or ()
        ctx.num_extras = len(extras)
        ctx.save_for_backward(*extras, *watched)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[results[i] for i in task.plain_results(results)])
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Computes gradients at whatever levels there are by now."""
        task: Task = ctx.task
        result: list[torch.Tensor | None] = [None] * len(ctx.arguments)
        extras = ctx.saved_tensors[: ctx.num_extras]
        if task.dual is not None:  # results come first, then tangents
            count = len(task.dual.job.pure().outputs)
            _add(result, task.dual, task.dual_tensors, cotangents[:count], ())
            cotangents = (*[None] * count, *cotangents[count:])
        _add(result, task, ctx.arguments, cotangents, extras, ctx.versions)
        if not graph_is_kept():
            ctx.arguments, task.dual_tensors = (), ()
        return (None, *result)


def _add(
    result: list[torch.Tensor | None],
    task: Task,
    tensors: Tensors,
    cotangents: Sequence[torch.Tensor | None],
    extras: Tensors,
    before: Sequence[int] = (),
) -> None:
    """Adds a task's gradients to those of its arguments."""
    job, places, given = task.gradient(cotangents)
    if not places:
        return
    in_use = range(len(tensors)) if torch.is_grad_enabled() or job.value is None else job.value.arguments
    _check_unchanged(task, tensors, before, in_use)
    every = [*tensors[: task.job.count], *given, *extras]
    if any(map(is_dead, every)):
        every = [alive(tensor) for tensor in every]
    if is_last_backward(task.level, tensors[task.wanted[0]]):
        with below(task.level):
            grads = task.evaluate(job, [unwrap(tensor, task.level) for tensor in every])[0]
    else:
        grads = task.evaluate(job, every)[0]
    for i, grad in zip(places, grads, strict=True):
        found = result[i]
        result[i] = grad if found is None else found + grad


def _check_unchanged(task: Task, tensors: Tensors, before: Sequence[int], in_use: Sequence[int]) -> None:
    now = versions(tensors)
    if not before or now == before:
        return
    changed = next((i for i in in_use if i < len(before) and now[i] != before[i]), None)
    if changed is not None:
        raise RuntimeError(
            f"Expected the arguments of {task.job.pure().shop.name} to stay as they were until the backward, got one "
            f"of shape {list(tensors[changed].shape)} changed in place. Use the out-of-place operation."
        )
