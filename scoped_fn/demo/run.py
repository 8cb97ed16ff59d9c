"""One training run: compiled, then stepped until it is done or stopped by Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from scoped_fn.demo.changes import Change
from scoped_fn.demo.checkpoint import save_checkpoint
from scoped_fn.demo.errors import CommandError, first_line
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.screen import Advance, counted_phase, phase
from scoped_fn.demo.text import Corpus
from scoped_fn.demo.train import Carry, Engine, advance_engine, build_engine, due_passes, train_step

INTERRUPTED = 130
CHECKPOINT_EVERY_S = 30.0

Watch = Callable[[Carry], None]


@dataclass(frozen=True)
class Job:
    """What a run begins with: its options, its text, the compiled model, and where progress is shown."""

    options: TrainOptions
    corpus: Corpus
    engine: Engine
    progress: Console


@dataclass(frozen=True)
class Outcome:
    """How far training came.

    Attributes:
        carry: The run after its last whole step.
        engine: The model as compiled by then.
        steps: Number of steps made now, without those of a resumed checkpoint.
        training_s: Seconds that they took, without those of a schedule's compiling.
        interrupted: Whether Ctrl-C ended them.
    """

    carry: Carry
    engine: Engine
    steps: int
    training_s: float
    interrupted: bool


def compile_run(
    options: TrainOptions, corpus: Corpus, progress: Console, description: str, *, first_step: int = 0
) -> tuple[Carry, Job]:
    """Returns the run before its first step, compiled for `first_step` of its schedule.

    Raises:
        CommandError: The backend cannot compile on this machine.
    """
    with phase(progress, description), failure_in_one_line(options.backend):
        carry, engine = build_engine(options, corpus, first_step=first_step)
    return carry, Job(options, corpus, engine, progress)


def train_until_stopped(
    carry: Carry, job: Job, *, description: str = "training", watch: Watch | None = None
) -> Outcome:
    """Makes the steps that are left, and saves checkpoints.

    Args:
        carry: Where to begin.
        job: The run.
        description: What the progress bar calls it.
        watch: Called with the run after each step.

    Raises:
        KeyboardInterrupt: Ctrl-C before the first step.
    """
    options, engine, resumed_at, interrupted = job.options, job.engine, len(carry.losses), False
    started = saved_at = time.perf_counter()
    _announce(job, engine.changes)
    try:
        with counted_phase(job.progress, description, done=resumed_at, total=options.steps) as advance:
            while len(carry.losses) < options.steps:
                begun = time.perf_counter()
                carry, engine = _follow_schedule(carry, engine, job, advance)
                started += time.perf_counter() - begun  # the speed is that of steps
                carry = train_step(carry, engine.step, job.corpus, options)  # all of a step or nothing, also on Ctrl-C
                now = time.perf_counter()
                rate = options.tokens_per_step * (len(carry.losses) - resumed_at) / (now - started)
                advance(len(carry.losses), f"loss {carry.losses[-1]:.3f}  {rate:,.0f} tokens/s")
                if watch is not None:
                    watch(carry)
                if now - saved_at > CHECKPOINT_EVERY_S:
                    save_checkpoint(carry, options)
                    saved_at = now
    except KeyboardInterrupt:
        if not carry.losses:
            raise
        interrupted = True
    return Outcome(carry, engine, len(carry.losses) - resumed_at, time.perf_counter() - started, interrupted)


def _follow_schedule(carry: Carry, engine: Engine, job: Job, advance: Advance) -> tuple[Carry, Engine]:
    """Returns the run and the model for the next step, and shows what came into force.

    Raises:
        CommandError: The backend cannot compile it. The steps made so far are saved.
    """
    if due_passes(carry, engine, job.options) is None:
        return carry, engine
    advance(len(carry.losses), "compiling other passes")
    try:
        with failure_in_one_line(job.options.backend):
            carry, engine = advance_engine(carry, engine, job.corpus, job.options)
    except CommandError:
        save_checkpoint(carry, job.options)
        raise
    _announce(job, engine.changes[-1:])
    return carry, engine


def _announce(job: Job, changes: Sequence[Change]) -> None:
    for change in changes:
        job.progress.print(str(change), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def failure_in_one_line(backend: str) -> Iterator[None]:
    """Turns what a compiler raises in the block into a `CommandError`."""
    try:
        yield
    except RuntimeError as error:
        reason = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        raise CommandError(
            f"Expected a backend that compiles here, got '{backend}': {reason}. "
            "Run `scoped-fn doctor` to see which do; `--backend eager` needs no compiler."
        ) from error
