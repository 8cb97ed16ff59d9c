"""How a compiled function answers `grad`, `vmap` and `jvp`: levels peel off one by one, the lowest runs compiled code.

A grad level becomes one node in that level's autograd graph; a jvp level calls the derived function that computes
tangents too; a vmap level calls the batched one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from scoped_fn._halves import Halves, Value, halves_of
from scoped_fn._pure import Batch, NotDerivable, Pure
from scoped_fn._specs import laid_out
from scoped_fn._torch import version
from scoped_fn._torch_levels import (
    GRAD,
    JVP,
    VMAP,
    SingleLevelFunction,
    add_batch,
    alive,
    at_level,
    below,
    below_from_within,
    dual_parts,
    forward_mode_active,
    graph_is_kept,
    highest_level,
    is_at,
    kinds_of_levels,
    make_dual,
    single_level_allowed,
    transforms_active,
    unwrap,
    unwrap_batch,
    wrap,
)

Tensors = Sequence[torch.Tensor]
Results = tuple[list[torch.Tensor], list[torch.Tensor] | None]


@dataclass(frozen=True, eq=False)
class Job:
    """What to compute.

    Attributes:
        pure: Returns the function, of the first tensors; derivatives and batched versions are derived from it.
        count: How many tensors it takes.
        random: Whether it draws random numbers, so that a vmap level concerns it in any case.
        value: What computes its results where nothing is to be derived any more; None for the function's own code.
        halves: The halves whose forward `value` is; its results are followed by saved tensors.
        below: The same, where a vmap level has been peeled, so that their backward does not fit any more.
    """

    pure: Callable[[], Pure]
    count: int
    random: bool
    value: Value | None = None
    halves: Halves | None = None
    below: Halves | None = None

    @property
    def num_results(self) -> int | None:
        """How many results of `value` are the function's; None if all are."""
        halves = self.halves or self.below
        return halves.num_results if halves else None


def call(pure: Pure, tensors: Tensors) -> list[torch.Tensor]:
    """Returns the function's results for tensors of any levels."""
    return evaluate(Job(lambda: pure, len(tensors), pure.shop.torch_rng), [alive(tensor) for tensor in tensors])[0]


def evaluate(job: Job, tensors: Tensors) -> Results:
    """Returns the results of a job, and what it saved if its value saves something."""
    if transforms_active() is None:
        return _guarded(_plain, job, tensors, None)
    level = highest_level(tensors, every_vmap=job.random)
    with at_level(level):
        return _guarded(_peel_of(level), job, tensors, level)


def _peel_of(level: Any) -> Callable[..., Results]:
    kinds = {None: _plain, GRAD: _grad, JVP: _jvp, VMAP: _vmap}
    return kinds.get(level.key() if level else None, _unknown)


def _guarded(peel: Callable[..., Results], job: Job, tensors: Tensors, level: Any) -> Results:
    try:
        return peel(job, tensors, level)
    except NotDerivable as reason:
        return _run_eager(job, tensors, reason), None


def _run_eager(job: Job, tensors: Tensors, reason: Exception) -> list[torch.Tensor]:
    """Runs the function itself, operation by operation, under the levels that are there: right, but not compiled."""
    pure = job.pure()
    results = list(pure.run(*tensors[: job.count]))
    pure.shop.memo.eager_calls += 1
    why = str(reason).strip().splitlines()
    warnings.warn(
        f"Expected {pure.shop.name} to stay compiled under this transform, got a part that runs eager: "
        f"{why[0] if why else type(reason).__name__}. The result is right; fn.cache_info().eager_calls counts them.",
        stacklevel=2,
    )
    return results


def _unknown(job: Job, tensors: Tensors, level: Any) -> Results:
    raise NotDerivable(f"{level.key().name} levels have no rule")


def _plain(job: Job, tensors: Tensors, level: None) -> Results:
    if forward_mode_active() and any(dual_parts(t)[1] is not None for t in tensors[: job.count]):
        return _jvp(job, tensors, None)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors[: job.count]):
        return _grad(job, tensors, None)
    return _launch(job, tensors)


def _launch(job: Job, tensors: Tensors) -> Results:
    if job.value is None:
        return list(job.pure().launch(tensors)), None
    results = job.value.launch([tensors[i] for i in job.value.arguments])
    if job.num_results is None:
        return list(results), None
    return list(results[: job.num_results]), list(results[job.num_results :])


def _jvp(job: Job, tensors: Tensors, level: Any) -> Results:
    parts = [dual_parts(t) if is_at(t, level) else (t, None) for t in tensors[: job.count]]
    mask = tuple(tangent is not None for _, tangent in parts)
    flat = [*(primal for primal, _ in parts), *(tangent for _, tangent in parts if tangent is not None)]
    if not any(mask):
        with below(level):
            return evaluate(job, [unwrap(tensor, level) for tensor in tensors])
    made, out_mask = job.pure().jvped(mask)
    with below(level):
        inner, _ = evaluate(Job(lambda: made, len(flat), job.random), [unwrap(t, level) for t in flat])
    outs, tangents = inner[: len(out_mask)], iter(inner[len(out_mask) :])
    duals = [(out, next(tangents) if has else None) for out, has in zip(outs, out_mask, strict=True)]
    return [o if t is None else make_dual(wrap(o, level), wrap(t, level)) for o, t in duals], None


def _vmap(job: Job, tensors: Tensors, level: Any) -> Results:
    if job.value is not None and job.value.pure is None:  # code cannot be batched, the function can
        job, tensors = Job(job.pure, job.count, job.random), tensors[: job.count]
    pairs = [unwrap_batch(tensor, level) for tensor in tensors]
    batched = tuple(at is not None for _, at in pairs)
    size, randomness = level.batch_size(), level.randomness()
    with below(level):
        inner = [t if at in (None, 0) else t.movedim(at, 0) for t, at in pairs]
        specs = tuple(map(laid_out, inner))

        def over(pure: Pure, arguments: Sequence[int], given: tuple[bool, ...] | None = None) -> tuple[Pure, Any]:
            mask = tuple(batched[i] for i in arguments)
            return pure.vmapped(Batch(size, mask, randomness, given), [specs[i] for i in arguments])

        if job.value is None:
            made, given = over(job.pure(), range(job.count))
            peeled = replace(job, pure=lambda: made)
        else:
            half, given = over(job.value.pure, job.value.arguments)
            value = replace(job.value, pure=half, launch=half.launch)
            peeled = Job(
                lambda: over(job.pure(), range(job.count), given[: job.num_results])[0],
                job.count,
                job.random,
                value,
                below=job.halves or job.below,
            )
        outs, extras = evaluate(peeled, inner)
    every = [*outs, *(extras or ())]
    every = [add_batch(t, level) if b else t for t, b in zip(every, given, strict=True)]
    return every[: len(outs)], None if extras is None else every[len(outs) :]


def _grad(job: Job, tensors: Tensors, level: Any) -> Results:
    wanted: tuple[int, ...] = ()
    if torch.is_grad_enabled():
        wanted = tuple(i for i in range(job.count) if is_at(tensors[i], level) and tensors[i].requires_grad)
    if not wanted:
        with below(level):
            return evaluate(job, [unwrap(tensor, level) for tensor in tensors])
    task = Task(job, level, wanted)
    results = list(_apply(task, tensors))
    return results, task.extras if job.num_results is not None else None


def differentiable_call(job: Job, tensors: Tensors, wanted: tuple[int, ...]) -> Tensors:
    """Returns the results of a job for plain tensors, of which the `wanted` ones require a gradient."""
    return _apply(Task(job, None, wanted), tensors)


def _apply(task: Task, tensors: Tensors) -> Tensors:
    with single_level_allowed():
        results: Tensors = Node.apply(task, *tensors)
    return results


class Task:
    """One node's work: set up by the caller, filled in by the forward, read by the backward.

    Attributes:
        job: The job that is peeled.
        level: The level of the node; None for plain autograd.
        wanted: Indices of the tensors that get gradients.
        halves: What computes gradients from saved tensors; None if nothing does.
        extras: The saved tensors.
    """

    def __init__(self, job: Job, level: Any, wanted: tuple[int, ...]) -> None:
        self.job, self.level, self.wanted = job, level, wanted
        self.halves: Halves | None = job.halves
        self.extras: list[torch.Tensor] | None = None

    def forward(self, tensors: Tensors) -> list[torch.Tensor]:
        """Returns the results, computed below the level."""
        job = self.job
        if job.value is None:
            kinds = kinds_of_levels(tensors)
            if JVP not in kinds:
                self.halves = halves_of(job.pure(), self.wanted, batched=VMAP in kinds)
                job = replace(job, value=self.halves.forward, halves=self.halves)
        outs, self.extras = evaluate(job, tensors)
        if self.extras is None or self.halves is None or not set(self.wanted) <= set(self.halves.wanted):
            self.halves = None
        return outs

    def plain_results(self, outs: Tensors) -> list[int]:
        """Returns the indices of the results that carry no gradient."""
        halves = self.halves or self.job.below
        if halves is not None:
            differentiable = halves.differentiable
        elif self.job.value is None:
            differentiable = self.job.pure().differentiable(self.wanted)
        else:  # gradients, which depend on the cotangents in any case
            differentiable = range(len(outs))
        kept = set(differentiable)
        return [i for i, o in enumerate(outs) if i not in kept or not (o.is_floating_point() or o.is_complex())]

    def gradient(self, cotangents: Sequence[torch.Tensor | None]) -> tuple[Job, tuple[int, ...], Tensors]:
        """Returns the job that computes gradients, the arguments these belong to, and the cotangents it takes."""
        job = self.job
        used = tuple(i for i, cotangent in enumerate(cotangents) if cotangent is not None)
        value = None
        if self.halves is not None:
            value, places = self.halves.backward(used, job.count)
        else:
            places = job.pure().reached(self.wanted, used)
        made = Job(lambda: job.pure().vjp(places, used), job.count + len(used), job.random, value)
        return made, places, [cotangents[i] for i in used]


class Node(SingleLevelFunction):
    """One call in the autograd graph of one level: compiled forward, compiled backward, derivatives of any order."""

    @staticmethod
    def forward(ctx: Any, task: Task, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        level = task.level
        with below_from_within(level):
            outs = task.forward([unwrap(tensor, level) for tensor in tensors])
        results = tuple(wrap(out, level) for out in outs)
        ctx.task, ctx.arguments, ctx.versions = task, tensors, [version(tensor) for tensor in tensors]
        watched = task.halves.watched(tensors, results) if task.halves is not None and level is None else ()
        ctx.num_extras = len(task.extras or ())
        ctx.save_for_backward(*(task.extras or ()), *watched)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(results[i] for i in task.plain_results(results)))
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        extras, tensors = ctx.saved_tensors[: ctx.num_extras], ctx.arguments
        job, places, given = ctx.task.gradient(cotangents)
        _check_unchanged(
            ctx, range(len(tensors)) if torch.is_grad_enabled() or job.value is None else job.value.arguments
        )
        count = ctx.task.job.count
        every = [alive(tensor) for tensor in (*tensors[:count], *given, *extras)]
        grads = evaluate(job, every)[0] if places else []
        result: list[torch.Tensor | None] = [None] * len(tensors)
        for i, grad in zip(places, grads, strict=True):
            result[i] = grad
        if not graph_is_kept():
            ctx.arguments = ()
        return (None, *result)


def _check_unchanged(ctx: Any, indices: Sequence[int]) -> None:
    for i in indices:
        if i < len(ctx.versions) and version(ctx.arguments[i]) != ctx.versions[i]:
            raise RuntimeError(
                f"Expected the arguments of {ctx.task.job.pure().shop.name} to stay as they were until the backward, "
                f"got one of shape {list(ctx.arguments[i].shape)} changed in place. Use the out-of-place operation."
            )
