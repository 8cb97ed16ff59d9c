"""``scoped-fn profile`` from its options to its exit code."""

from __future__ import annotations

from rich.console import Console

import scoped_fn as sf
from scoped_fn.demo.changes import remarks_of_passes
from scoped_fn.demo.errors import CommandError
from scoped_fn.demo.files import make_folder
from scoped_fn.demo.gpt import GPT
from scoped_fn.demo.precision import first_state
from scoped_fn.demo.profile_options import ProfileOptions
from scoped_fn.demo.profile_peak import held_at_peak, modules_of
from scoped_fn.demo.profile_picture import draw_timeline
from scoped_fn.demo.profile_report import Profiled, print_profiles, write_profiles
from scoped_fn.demo.run import failure_in_one_line
from scoped_fn.demo.screen import phase
from scoped_fn.demo.text import Corpus, read_corpus, training_batch

WITHOUT = "without passes"


def run_profile(options: ProfileOptions) -> int:
    """Profiles a training step, with ``--passes`` a second time with these; reports, and returns the exit code 0.

    Raises:
        CommandError: A file cannot be used, the backend cannot compile on this machine, or a node failed.
    """
    corpus = read_corpus(options.text, context=options.model.context)
    make_folder(options.out, "--out")
    progress = Console(stderr=True)
    with failure_in_one_line(options.backend):
        steps = profile_step(options, corpus, progress)
    written = _write_files(steps, options)
    print_profiles(Console(), steps, options)
    failed = next((each.profile.error for each in steps if not each.profile.complete), None)
    if failed is not None:
        raise CommandError(f"Expected every node to run, got {failed.rstrip('.')}. {written} hold those that did.")
    progress.print(f"Done; saved {written}.", highlight=False, markup=False, soft_wrap=True)
    return 0


def profile_step(options: ProfileOptions, corpus: Corpus, progress: Console) -> tuple[Profiled, ...]:
    """Returns a training step without passes, and where there are passes, the same step with them."""
    batch = training_batch(corpus, seed=options.seed, step=0, batch=options.batch, context=options.model.context)
    with phase(progress, f"compiling for {options.backend}"):
        state = first_state(options.seed, options.recipe)
        model = GPT(options.model, seed=options.seed)
        state, fn = sf.compile(state, model, batch, backend=options.backend, name="gpt")
    with phase(progress, "running a step node by node"):
        state, plain = sf.profile(sf.push_inputs(state, fn, batch), fn)
    found = Profiled(WITHOUT, plain, held_at_peak(fn, plain), modules_of(fn))
    if options.passes is None:
        return (found,)
    with phase(progress, f"compiling with {options.passes.words}"), remarks_of_passes() as remarks:
        state, fn = sf.recompile(state, fn, options.passes.passes, profile=plain)
    with phase(progress, f"running a step with {options.passes.words} node by node"):
        state, changed = sf.profile(sf.push_inputs(state, fn, batch), fn)
    held = held_at_peak(fn, changed)
    return found, Profiled(options.passes.words, changed, held, modules_of(fn), tuple(remarks))


def _write_files(steps: tuple[Profiled, ...], options: ProfileOptions) -> str:
    """Writes the picture and the numbers; returns the names of both, for a sentence."""
    picture, numbers = options.out / "memory.png", options.out / "profile.json"
    draw_timeline(picture, {each.words: each.profile for each in steps})
    write_profiles(numbers, steps, options)
    return f"{picture} and {numbers}"
