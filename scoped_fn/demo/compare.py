"""``scoped-fn train --compare``: every recipe and the unquantized model, from one seed on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console

from scoped_fn import stages
from scoped_fn.demo.compare_report import Contender, Traces, print_comparison
from scoped_fn.demo.errors import UsageError
from scoped_fn.demo.files import make_folders, write_comparison_files
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.precision import RECIPES, first_state, scales_of, summarize_scales
from scoped_fn.demo.run import INTERRUPTED, Job, compile_run, train_until_stopped
from scoped_fn.demo.screen import phase
from scoped_fn.demo.text import Corpus, read_corpus
from scoped_fn.demo.timing import median_ms, step_of
from scoped_fn.demo.train import Carry, first_batch, validate


@dataclass(frozen=True)
class Entrant:
    """A recipe's results, and its run to measure further; `interrupted` after Ctrl-C."""

    results: Contender
    job: Job
    carry: Carry
    interrupted: bool


def run_comparison(options: TrainOptions) -> int:
    """Trains with each recipe, then times their steps and reports; returns the exit code: 0, or 130 after Ctrl-C.

    Raises:
        CommandError: A file cannot be used, or the backend cannot compile on this machine.
        KeyboardInterrupt: Ctrl-C before there was anything to save.
    """
    others = {"--checkpoint": options.checkpoint, "--resume": options.resume, "--schedule": options.schedule}
    for other, given in others.items():
        if given is not None:
            raise UsageError(f"Expected --compare without {other}, got both. Leave one out.")
    corpus = read_corpus(options.text, context=options.model.context)
    make_folders(options)
    progress = Console(stderr=True)
    entrants, complete = _train_all(options, corpus, progress)
    if not entrants:
        raise KeyboardInterrupt
    results = [each.results for each in entrants]
    if complete and options.timing:
        results, complete = _timed(entrants, progress)
    written = write_comparison_files(results, options)
    print_comparison(Console(), results, options)
    whole = sum(each.finished for each in results)
    end = "Done" if complete else f"Interrupted after {whole} of {len(RECIPES)} runs"
    progress.print(f"{end}; saved {written}.", highlight=False, markup=False, soft_wrap=True)
    return 0 if complete else INTERRUPTED


def saved_bytes(job: Job) -> int:
    """Returns the bytes that a step keeps from its forward for its backward, parameters and inputs not counted."""
    options = job.options
    state = first_state(options.seed, options.recipe)
    with torch.enable_grad():
        state, captured = stages.capture(state, job.engine.model, first_batch(options, job.corpus))
        state, captured = stages.autocast(state, captured)
        state, joint = stages.lower_training(state, captured, backend=options.backend)
    return stages.partition(state, joint)[1].saved_bytes


def _train_all(options: TrainOptions, corpus: Corpus, progress: Console) -> tuple[list[Entrant], bool]:
    """Returns what was trained, and whether that is everything."""
    entrants: list[Entrant] = []
    try:
        for recipe in RECIPES:
            entrants.append(_train_one(replace(options, recipe=recipe), corpus, progress))
            if entrants[-1].interrupted:
                return entrants, False
    except KeyboardInterrupt:
        return entrants, False
    return entrants, True


def _train_one(options: TrainOptions, corpus: Corpus, progress: Console) -> Entrant:
    carry, job = compile_run(options, corpus, progress, f"compiling {options.recipe} with {options.backend}")
    traces = _empty_traces(carry)
    outcome = train_until_stopped(carry, job, description=options.recipe, watch=lambda now: _record(traces, now))
    carry, interrupted = outcome.carry, outcome.interrupted
    results = Contender(
        recipe=options.recipe,
        planned_steps=options.steps,
        losses=carry.losses,
        compile_s=job.engine.compile_s,
        training_s=outcome.training_s,
        scales=summarize_scales(carry.state),
        traces=traces,
    )
    try:
        with phase(progress, f"validating {options.recipe}"):
            results = replace(results, validation_loss=validate(carry, job.engine, corpus, options))
            results = replace(results, saved_bytes=saved_bytes(job))
    except KeyboardInterrupt:
        interrupted = True
    return Entrant(results, job, carry, interrupted)


def _timed(entrants: Sequence[Entrant], progress: Console) -> tuple[list[Contender], bool]:
    """Returns the results with the time of a step, and whether it was measured."""
    results = [each.results for each in entrants]
    steps = {
        each.results.recipe: step_of(each.carry, each.job.engine, first_batch(each.job.options, each.job.corpus))
        for each in entrants
    }
    try:
        with phase(progress, "timing a step of each in turn"):
            times = median_ms(steps)
    except KeyboardInterrupt:
        return results, False
    return [replace(each, step_ms=times[each.recipe]) for each in results], True


def _empty_traces(carry: Carry) -> Traces:
    """Returns a place for the scales of three sites: an early one, one past the middle and the last."""
    held = scales_of(carry.state)
    if held is None:
        return {}
    sites = list(dict.fromkeys(site for site, _ in held.columns))
    chosen = dict.fromkeys((sites[min(1, len(sites) - 1)], sites[2 * len(sites) // 3], sites[-1]))
    return {site: {role: [] for name, role in held.columns if name == site} for site in chosen}


def _record(traces: Traces, carry: Carry) -> None:
    held = scales_of(carry.state)
    if held is None:
        return
    for (site, role), scale in zip(held.columns, held.scale.tolist(), strict=True):
        if site in traces:
            traces[site][role].append(scale)
