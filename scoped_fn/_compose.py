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
    has_wrapped_tangent,
    highest_level,
    is_at,
    is_legacy,
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
    if any(map(is_legacy, tensors)):
        return _run_eager(job, tensors, NotDerivable("the older vmap of is_grads_batched has no rule")), None
    if transforms_active() is None:
        return _guarded(_plain, job, tensors, None)
    if forward_mode_active() and any(map(has_wrapped_tangent, tensors[: job.count])):
        return _guarded(_jvp, job, tensors, None)
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
    dual = forward_mode_active() and any(dual_parts(t)[1] is not None for t in tensors[: job.count])
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors[: job.count]):
        return _dual_grad(job, tensors) if dual else _grad(job, tensors, None)
    return _jvp(job, tensors, None) if dual else _launch(job, tensors)


def _launch(job: Job, tensors: Tensors) -> Results:
    if job.value is None:
        return list(job.pure().launch(tensors[: job.count])), None
    results = job.value.launch([tensors[i] for i in job.value.arguments])
    if job.num_results is None:
        return list(results), None
    return list(results[: job.num_results]), list(results[job.num_results :])


def _jvp(job: Job, tensors: Tensors, level: Any) -> Results:
    mask, flat = _parts(tensors[: job.count], level)
    if not any(mask):
        with below(level):
            return evaluate(job, [unwrap(tensor, level) for tensor in tensors])
    made, out_mask = job.pure().jvped(mask)
    with below(level):
        inner, _ = evaluate(Job(lambda: made, len(flat), job.random), [unwrap(t, level) for t in flat])
    return _duals(inner, out_mask, level), None


def _parts(tensors: Tensors, level: Any) -> tuple[tuple[bool, ...], list[torch.Tensor]]:
    """Returns which tensors have a tangent at the level, and the primals, followed by these tangents."""
    with at_level(level):
        parts = [dual_parts(t) if is_at(t, level) else (t, None) for t in tensors]
    tangents = [tangent for _, tangent in parts if tangent is not None]
    return tuple(tangent is not None for _, tangent in parts), [*(primal for primal, _ in parts), *tangents]


def _duals(inner: Tensors, out_mask: tuple[bool, ...], level: Any) -> list[torch.Tensor]:
    """Returns results at the level from results below it, followed by the tangents of those that `out_mask` names."""
    outs, tangents = inner[: len(out_mask)], iter(inner[len(out_mask) :])
    duals = [(out, next(tangents) if has else None) for out, has in zip(outs, out_mask, strict=True)]
    return [o if t is None else make_dual(wrap(o, level), wrap(t, level)) for o, t in duals]


def _dual_grad(job: Job, tensors: Tensors) -> Results:
    """Runs a job on plain tensors of which some have a tangent and some require a gradient."""
    mask, flat = _parts(tensors[: job.count], None)
    made, out_mask = job.pure().jvped(mask)
    wanted = tuple(i for i, tensor in enumerate(flat) if tensor.requires_grad)
    task = Task(Job(lambda: made, len(flat), job.random), None, wanted)
    task.dual = Task(Job(job.pure, job.count, job.random), None, tuple(i for i in wanted if i < job.count))
    task.dual_tensors = tensors[: job.count]
    return _duals(_apply(task, flat), out_mask, None), None


def _vmap(job: Job, tensors: Tensors, level: Any) -> Results:
    pairs = [unwrap_batch(tensor, level) for tensor in tensors]
    with below(level):
        inner = [t if at in (None, 0) else t.movedim(at, 0) for t, at in pairs]
        over = Over(level.batch_size(), level.randomness(), [at is not None for _, at in pairs], inner)
        try:
            peeled, given = over.job(job)
        except NotDerivable:
            if job.value is None:
                raise
            try:  # the value's graph cannot be batched; perhaps the function can
                peeled, given = over.job(Job(job.pure, job.count, job.random))
            except NotDerivable:
                return _one_by_one(job, over, level)
        outs, extras = evaluate(peeled, inner)
    every = [*outs, *(extras or ())]
    every = [add_batch(t, level) if b else t for t, b in zip(every, given, strict=False)]
    return every[: len(outs)], None if extras is None else every[len(outs) :]


class Over:
    """A vmap level that is peeled off: `tensors` below it, and which of them have the batch as first dimension."""

    def __init__(self, size: int, randomness: str, batched: Sequence[bool], tensors: Tensors) -> None:
        self.size, self.randomness, self.batched, self.tensors = size, randomness, batched, tensors
        self.specs = [laid_out(tensor) for tensor in tensors]

    def job(self, job: Job) -> tuple[Job, tuple[bool, ...]]:
        """Returns the batched job, and which of its results have the batch."""
        if job.value is None:
            made, given = self._pure(job.pure(), range(job.count))
            return Job(lambda: made, job.count, job.random), given
        if job.value.pure is None:
            raise NotDerivable("code cannot be batched")
        half, given = self._pure(job.value.pure, job.value.arguments)
        results = given[: job.num_results]
        value = replace(job.value, pure=half, launch=half.launch)
        halves = job.halves or job.below

        def pure() -> Pure:
            return self._pure(job.pure(), range(job.count), results)[0]

        return Job(pure, job.count, job.random, value, below=halves), given

    def _pure(
        self, pure: Pure, arguments: Sequence[int], given: tuple[bool, ...] | None = None
    ) -> tuple[Pure, tuple[bool, ...]]:
        mask = tuple(self.batched[i] for i in arguments)
        return pure.vmapped(Batch(self.size, mask, self.randomness, given), [self.specs[i] for i in arguments])


def _one_by_one(job: Job, over: Over, level: Any) -> Results:
    """Runs a job that cannot be batched once for each index."""
    rows = [
        evaluate(job, [t[i] if b else t for t, b in zip(over.tensors, over.batched, strict=True)])
        for i in range(over.size)
    ]
    every = [[*outs, *(extras or ())] for outs, extras in rows]
    stacked = [add_batch(torch.stack(parts), level) for parts in zip(*every, strict=True)]
    count, extras = len(rows[0][0]), rows[0][1]
    return stacked[:count], None if extras is None else stacked[count:]


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
        dual: For a node that computes tangents too: the task without them, which gives gradients that have tangents.
        dual_tensors: Its tensors.
    """

    def __init__(self, job: Job, level: Any, wanted: tuple[int, ...]) -> None:
        self.job, self.level, self.wanted = job, level, wanted
        self.halves: Halves | None = job.halves
        self.extras: list[torch.Tensor] | None = None
        self.dual: Task | None = None
        self.dual_tensors: Tensors = ()

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
            differentiable = _or_else(lambda: self.job.pure().differentiable(self.wanted), range(len(outs)))
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
            places = _or_else(lambda: job.pure().reached(self.wanted, used), self.wanted)
        made = Job(lambda: job.pure().vjp(places, used), job.count + len(used), job.random, value)
        return made, places, [cotangents[i] for i in used]


def _or_else(derive: Callable[[], Sequence[int]], fallback: Sequence[int]) -> Sequence[int]:
    try:
        return derive()
    except NotDerivable:
        return fallback


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
        task, result = ctx.task, [None] * len(ctx.arguments)
        if task.dual is not None:  # results come first, then tangents
            count = len(task.dual.job.pure().outputs)
            _add(result, *_gradients(task.dual, task.dual_tensors, cotangents[:count], ()))
            cotangents = (*[None] * count, *cotangents[count:])
        job, *_ = task.gradient(cotangents)
        in_use = range(len(ctx.arguments)) if torch.is_grad_enabled() or job.value is None else job.value.arguments
        _check_unchanged(ctx, in_use)
        _add(result, *_gradients(task, ctx.arguments, cotangents, ctx.saved_tensors[: ctx.num_extras]))
        if not graph_is_kept():
            ctx.arguments = ()
        return (None, *result)


def _gradients(
    task: Task, tensors: Tensors, cotangents: Sequence[torch.Tensor | None], extras: Tensors
) -> tuple[Sequence[int], Tensors]:
    """Returns the arguments of a task that get a gradient, and their gradients."""
    job, places, given = task.gradient(cotangents)
    every = [alive(tensor) for tensor in (*tensors[: task.job.count], *given, *extras)]
    return places, evaluate(job, every)[0] if places else ()


def _add(result: list[torch.Tensor | None], places: Sequence[int], grads: Tensors) -> None:
    for i, grad in zip(places, grads, strict=True):
        before = result[i]
        result[i] = grad if before is None else before + grad


def _check_unchanged(ctx: Any, indices: Sequence[int]) -> None:
    for i in indices:
        if i < len(ctx.versions) and version(ctx.arguments[i]) != ctx.versions[i]:
            raise RuntimeError(
                f"Expected the arguments of {ctx.task.job.pure().shop.name} to stay as they were until the backward, "
                f"got one of shape {list(ctx.arguments[i].shape)} changed in place. Use the out-of-place operation."
            )
