"""How a compiled function answers `grad`, `vmap` and `jvp`: levels peel off one by one, the lowest runs compiled code.

A grad level becomes one node in that level's autograd graph; a jvp level calls the derived function that computes
tangents too; a vmap level calls the batched one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from scoped_fn._errors import RandomOpError
from scoped_fn._halves import Value
from scoped_fn._job import Job, Results, Tensors
from scoped_fn._node import Task
from scoped_fn._pure import Batch, Pure
from scoped_fn._torch.dual import dual_parts, forward_mode_active, has_wrapped_tangent, make_dual
from scoped_fn._torch.levels import GRAD, JVP, NOTHING, VMAP, Level, at_level, below, transforms_active
from scoped_fn._torch.older_vmap import OlderVmap, in_older_vmap
from scoped_fn._torch.tracing import call_as_node, tracing_proxies
from scoped_fn._torch.wrapped import alive, highest_level, is_at, is_dead, unwrap, wrap
from scoped_fn._trace import NotDerivableError


def call(pure: Pure, tensors: Tensors) -> Tensors:
    """Returns the function's results for tensors of any levels."""
    if any(map(is_dead, tensors)):
        tensors = [alive(tensor) for tensor in tensors]
    return evaluate(Job(lambda: pure, len(tensors), pure.shop.torch_rng), tensors)[0]


def differentiable_call(job: Job, tensors: Tensors, wanted: tuple[int, ...]) -> Tensors:
    """Returns the results of a job for plain tensors, of which the `wanted` ones require a gradient."""
    return Task(evaluate, job, None, wanted).apply(tensors)[0]


def evaluate(job: Job, tensors: Tensors) -> Results:
    """Returns the results of a job, and what it saved if its value saves something."""
    if forward_mode_active() and has_wrapped_tangent(tensors[: job.count]):
        return _guarded(_jvp, job, tensors, None)
    if in_older_vmap(tensors):
        return _guarded(_vmap, job, tensors, OlderVmap(tensors))
    if transforms_active() is None:
        return _guarded(_plain, job, tensors, None)
    level = highest_level(tensors, every_vmap=job.random)
    with at_level(level):
        return _guarded(_peel_of(level), job, tensors, level)


def _peel_of(level: Level | None) -> Callable[..., Results]:
    if level is None:
        return _plain
    return {GRAD: _grad, JVP: _jvp, VMAP: _vmap}.get(level.kind, _unknown)


def _guarded(peel: Callable[..., Results], job: Job, tensors: Tensors, level: Level | OlderVmap | None) -> Results:
    try:
        return peel(job, tensors, level)
    except NotDerivableError as reason:
        return job.run_eager(tensors, reason)


def _unknown(job: Job, tensors: Tensors, level: Level) -> Results:
    raise NotDerivableError(f"{level.kind.name} levels have no rule")


def _plain(job: Job, tensors: Tensors, level: None) -> Results:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors[: job.count]):
        return _grad(job, tensors, None)
    if _has_tangent(tensors[: job.count], None):
        return _jvp(job, tensors, None)
    return job.launch(tensors) if tracing_proxies() is None else _as_node(job, tensors)


def _as_node(job: Job, tensors: Tensors) -> Results:
    """Launches a job while a graph is being recorded: the call becomes one node, which takes tensors of any levels."""
    counts: list[int] = []

    def run(given: Tensors) -> Tensors:
        outs, extras = evaluate(job, given)
        counts[:] = [len(outs)] if extras is None else [len(outs), len(extras)]
        return [*outs, *(extras or ())]

    results = call_as_node(run, list(tensors))
    return results[: counts[0]], results[counts[0] :] if len(counts) > 1 else None


def _has_tangent(tensors: Tensors, level: Level | None) -> bool:
    return forward_mode_active() and any(_parts(tensors, level)[0])


def _grad(job: Job, tensors: Tensors, level: Level | None) -> Results:
    wanted: tuple[int, ...] = ()
    if torch.is_grad_enabled():
        own = tensors[: job.count]
        wanted = tuple([i for i, tensor in enumerate(own) if tensor.requires_grad and is_at(tensor, level)])
    if _has_tangent(tensors[: job.count], level):  # dual numbers, not made by a jvp level
        return _dual_grad(job, tensors, level) if wanted else _jvp(job, tensors, level)
    if not wanted:
        with below(level):
            return evaluate(job, [unwrap(tensor, level) for tensor in tensors])
    results, extras = Task(evaluate, job, level, wanted).apply(tensors)
    return results, extras if job.halves or job.above else None


def _jvp(job: Job, tensors: Tensors, level: Level | None) -> Results:
    mask, flat = _parts(tensors[: job.count], level)
    if not any(mask):
        with below(level):
            return evaluate(job, [unwrap(tensor, level) for tensor in tensors])
    made, out_mask = job.pure().jvped(mask)
    with below(level):
        inner, _ = evaluate(Job(lambda: made, len(flat), job.random), [unwrap(t, level) for t in flat])
    return _duals(inner, out_mask, level), None


def _parts(tensors: Tensors, level: Level | None) -> tuple[tuple[bool, ...], list[torch.Tensor]]:
    """Returns which tensors have a tangent at the level, and the primals, followed by these tangents."""
    with at_level(level):
        parts = [dual_parts(t) if is_at(t, level) else (t, None) for t in tensors]
    tangents = [tangent for _, tangent in parts if tangent is not None]
    return tuple(tangent is not None for _, tangent in parts), [*(primal for primal, _ in parts), *tangents]


def _duals(inner: Tensors, out_mask: tuple[bool, ...], level: Level | None) -> list[torch.Tensor]:
    """Returns results at the level from results below it, followed by the tangents of those that `out_mask` names."""
    outs, tangents = inner[: len(out_mask)], iter(inner[len(out_mask) :])
    duals = [(out, next(tangents) if has else None) for out, has in zip(outs, out_mask, strict=True)]
    return [o if t is None else make_dual(wrap(o, level), wrap(t, level)) for o, t in duals]


def _dual_grad(job: Job, tensors: Tensors, level: Level | None) -> Results:
    """Runs a job on tensors of which, at one level, some have a tangent and some require a gradient."""
    mask, flat = _parts(tensors[: job.count], level)
    made, out_mask = job.pure().jvped(mask)
    wanted = tuple(i for i, tensor in enumerate(flat) if tensor.requires_grad and is_at(tensor, level))
    task = Task(evaluate, Job(lambda: made, len(flat), job.random), level, wanted)
    task.dual = Task(evaluate, job.without_value(), level, tuple(i for i in wanted if i < job.count))
    task.dual_tensors = tensors[: job.count]
    return _duals(task.apply(flat)[0], out_mask, None), None


def _vmap(job: Job, tensors: Tensors, level: Level | OlderVmap) -> Results:
    pairs = [level.unwrap_batch(tensor) for tensor in tensors]
    with NOTHING if isinstance(level, OlderVmap) else below(level):
        inner = [t if at is None or at == 0 else t.movedim(at, 0) for t, at in pairs]
        over = Over(level, [at is not None for _, at in pairs], inner)
        try:
            peeled, given = over.job(job)
        except NotDerivableError:
            if job.value is None:
                raise
            try:  # the value's graph cannot be batched; perhaps the function can
                peeled, given = over.job(job.without_value())
            except (NotDerivableError, RandomOpError):
                return _one_by_one(job, over, level)
        outs, extras = evaluate(peeled, inner)
    every = [*outs, *extras] if extras else outs
    every = [level.add_batch(t) if b else t for t, b in zip(every, given, strict=False)]
    return every[: len(outs)], None if extras is None else every[len(outs) :]


class Over:
    """A vmap level that is peeled off: the tensors below it, and which of them have the batch as first dimension."""

    def __init__(self, level: Level | OlderVmap, batched: Sequence[bool], tensors: Tensors) -> None:
        self.size, self.randomness = level.batch()
        self.batched, self.tensors = batched, tensors

    def job(self, job: Job) -> tuple[Job, tuple[bool, ...]]:
        """Returns the batched job, and which of its results have the batch."""
        value, own = job.value, range(job.count)
        if value is None:
            made, given = self._over(job.pure(), own)
            return Job(lambda: made, job.count, job.random), given
        if value.pure is None:
            raise NotDerivableError("code cannot be batched")
        half, given = self._over(value.pure, value.arguments)
        halves, pure = job.halves or job.above, job.pure
        results = given if halves is None else given[: halves.num_results]
        batched = Value(half.launch, value.arguments, half)
        made_of_pure = lambda: self._over(pure(), own, results)[0]  # noqa: E731
        return Job(made_of_pure, job.count, job.random, batched, above=halves), given

    def _over(self, pure: Pure, arguments: Sequence[int], given: Any = None) -> tuple[Pure, tuple[bool, ...]]:
        mask = tuple([self.batched[i] for i in arguments])
        return pure.vmapped(Batch(self.size, mask, self.randomness, given), [self.tensors[i] for i in arguments])


def _one_by_one(job: Job, over: Over, level: Level | OlderVmap) -> Results:
    """Runs a job that cannot be batched once for each index."""
    rows = [
        evaluate(job, [t[i] if b else t for t, b in zip(over.tensors, over.batched, strict=True)])
        for i in range(over.size)
    ]
    every = [[*outs, *(extras or ())] for outs, extras in rows]
    stacked = [level.add_batch(torch.stack(parts)) for parts in zip(*every, strict=True)]
    count, extras = len(rows[0][0]), rows[0][1]
    return stacked[:count], None if extras is None else stacked[count:]
