"""``scoped-fn train`` from its options to its exit code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rich.console import Console

import scoped_fn as sf
from scoped_fn.demo.checkpoint import load_checkpoint, resume, save_checkpoint
from scoped_fn.demo.compare import compare_steps
from scoped_fn.demo.errors import CommandError, first_line
from scoped_fn.demo.files import make_folders, write_files
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.report import Summary, print_table, printable
from scoped_fn.demo.screen import counted_phase, phase
from scoped_fn.demo.text import Corpus, read_corpus
from scoped_fn.demo.train import Carry, Engine, build_engine, first_batch, sample, train, validate

INTERRUPTED = 130
SAMPLE_BYTES = 120
CHECKPOINT_EVERY_S = 30.0


@dataclass(frozen=True)
class Job:
    """What stays the same during a run: its options, its text, the compiled model, and where progress is shown."""

    options: TrainOptions
    corpus: Corpus
    engine: Engine
    progress: Console


@dataclass(frozen=True)
class Outcome:
    """How far training came.

    Attributes:
        carry: The run after its last whole step.
        steps: Number of steps made now, without those of a resumed checkpoint.
        training_s: Seconds that they took.
        interrupted: Whether Ctrl-C ended them.
    """

    carry: Carry
    steps: int
    training_s: float
    interrupted: bool


def run_training(options: TrainOptions) -> int:
    """Trains, saves and reports; returns the exit code: 0, or 130 after Ctrl-C.

    Raises:
        CommandError: A file cannot be used, or the backend cannot compile on this machine.
        KeyboardInterrupt: Ctrl-C before there was anything to save.
    """
    corpus = read_corpus(options.text, context=options.model.context)
    make_folders(options)
    saved = load_checkpoint(options)  # before the compilation: a file that cannot be used is said at once
    progress = Console(stderr=True)
    with phase(progress, f"compiling with {options.backend}"), _failure_in_one_line(options.backend):
        carry, engine = build_engine(options, corpus)
    job = Job(options, corpus, engine, progress)
    outcome = _train_until_stopped(carry if saved is None else resume(carry, saved), job)
    save_checkpoint(outcome.carry, options)
    summary, complete = _examine(outcome, job)
    sf.release(outcome.carry.state, engine.loss)
    written = write_files(summary, options)
    print_table(Console(), summary)
    end = "Done" if complete else f"Interrupted after {len(summary.losses)} of {options.steps} steps"
    progress.print(f"{end}; saved {written}.", highlight=False, markup=False, soft_wrap=True)
    return 0 if complete else INTERRUPTED


@contextmanager
def _failure_in_one_line(backend: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        raise CommandError(
            f"Expected a backend that compiles here, got '{backend}': {reason}. "
            "Run `scoped-fn doctor` to see which do; `--backend eager` needs no compiler."
        ) from error


def _train_until_stopped(carry: Carry, job: Job) -> Outcome:
    options, resumed_at, interrupted = job.options, len(carry.losses), False
    started = saved_at = time.perf_counter()
    try:
        with counted_phase(job.progress, "training", done=resumed_at, total=options.steps) as advance:
            for after_step in train(carry, job.engine.step, job.corpus, options):
                carry = after_step  # all of a step or nothing: Ctrl-C cannot leave a half-made one
                now = time.perf_counter()
                rate = options.tokens_per_step * (len(carry.losses) - resumed_at) / (now - started)
                advance(len(carry.losses), f"loss {carry.losses[-1]:.3f}  {rate:,.0f} tokens/s")
                if now - saved_at > CHECKPOINT_EVERY_S:
                    save_checkpoint(carry, options)
                    saved_at = now
    except KeyboardInterrupt:
        if not carry.losses:
            raise
        interrupted = True
    return Outcome(carry, len(carry.losses) - resumed_at, time.perf_counter() - started, interrupted)


def _examine(outcome: Outcome, job: Job) -> tuple[Summary, bool]:
    """Returns the summary, and whether everything was done; Ctrl-C leaves out what comes after it."""
    options, carry = job.options, outcome.carry
    summary = Summary(
        seed=options.seed,
        backend=options.backend,
        planned_steps=options.steps,
        losses=carry.losses,
        compile_s=job.engine.compile_s,
        training_s=outcome.training_s,
        tokens_per_second=options.tokens_per_step * outcome.steps / outcome.training_s,
    )
    try:
        with phase(job.progress, "validating"):
            summary = replace(summary, validation_loss=validate(carry, job.engine, job.corpus, options))
            summary = replace(summary, sample=printable(sample(carry, job.engine, options, length=SAMPLE_BYTES)))
        if options.compare and not outcome.interrupted:
            with phase(job.progress, "timing a step against torch.compile and eager"):
                batch = first_batch(options, job.corpus)
                times = compare_steps(carry, job.engine, batch, backend=options.backend)
            summary = replace(summary, step_ms=times)
    except KeyboardInterrupt:
        return summary, False
    return summary, not outcome.interrupted
