"""``scoped-fn train`` from its options to its exit code."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

import scoped_fn as sf
from scoped_fn.demo.checkpoint import load_checkpoint, resume, save_checkpoint
from scoped_fn.demo.files import make_folders, write_files
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.precision import summarize_scales
from scoped_fn.demo.report import Summary, print_table, printable
from scoped_fn.demo.run import INTERRUPTED, Job, Outcome, compile_run, train_until_stopped
from scoped_fn.demo.screen import phase
from scoped_fn.demo.text import read_corpus
from scoped_fn.demo.timing import compare_steps
from scoped_fn.demo.train import first_batch, sample, validate

SAMPLE_BYTES = 120


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
    first_step = 0 if saved is None else len(saved.losses)
    carry, job = compile_run(options, corpus, progress, f"compiling with {options.backend}", first_step=first_step)
    outcome = train_until_stopped(carry if saved is None else resume(carry, saved), job)
    save_checkpoint(outcome.carry, options)
    summary, complete = _examine(outcome, job)
    sf.release(outcome.carry.state, outcome.engine.loss)
    written = write_files(summary, options)
    print_table(Console(), summary)
    end = "Done" if complete else f"Interrupted after {len(summary.losses)} of {options.steps} steps"
    progress.print(f"{end}; saved {written}.", highlight=False, markup=False, soft_wrap=True)
    return 0 if complete else INTERRUPTED


def _examine(outcome: Outcome, job: Job) -> tuple[Summary, bool]:
    """Returns the summary, and whether everything was done; Ctrl-C leaves out what comes after it."""
    options, carry, engine = job.options, outcome.carry, outcome.engine
    summary = Summary(
        seed=options.seed,
        backend=options.backend,
        recipe=options.recipe,
        planned_steps=options.steps,
        losses=carry.losses,
        compile_s=engine.compile_s,
        training_s=outcome.training_s,
        tokens_per_second=options.tokens_per_step * outcome.steps / outcome.training_s,
        scales=summarize_scales(carry.state),
        schedule=engine.changes,
    )
    try:
        with phase(job.progress, "validating"):
            summary = replace(summary, validation_loss=validate(carry, engine, job.corpus, options))
            summary = replace(summary, sample=printable(sample(carry, engine, options, length=SAMPLE_BYTES)))
        if options.timing and not outcome.interrupted:
            with phase(job.progress, "timing a step against torch.compile and eager"):
                batch = first_batch(options, job.corpus)
                times = compare_steps(carry, engine, batch, backend=options.backend)
            summary = replace(summary, step_ms=times)
    except KeyboardInterrupt:
        return summary, False
    return summary, not outcome.interrupted
