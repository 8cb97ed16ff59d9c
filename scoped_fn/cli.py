"""The command line: ``scoped-fn train``, ``profile``, ``inspect``, ``doctor`` and ``tune``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import scoped_fn as sf
from scoped_fn.demo.errors import CommandError, UsageError
from scoped_fn.demo.gpt import HEAD_WIDTH, GPTConfig
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.precision import RECIPES, UNQUANTIZED
from scoped_fn.demo.profile_options import ProfileOptions
from scoped_fn.demo.schedule import PASS_WORDS, parse_passes, parse_schedule

DESCRIPTION = "A functional compiler for PyTorch: everything that changes lives in one immutable state."
TRAIN = "Train a small byte-level GPT through scoped_fn.compile, then report losses, speed and a sampled text."
PROFILE = "Run one training step of the GPT node by node, and show where its time goes and what fills its memory."
INSPECT = "Show what a file of scoped_fn.save, a checkpoint of `scoped-fn train` for one, or a saved Engine holds."
DOCTOR = "Show versions, device, and which backends work here, by compiling a small function with each."
TUNE = "Time launch configurations of the FP8 kernels on this GPU and rewrite the table that the library launches by."

Parsed = TypeVar("Parsed")


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.rstrip('.')}. See `{self.prog} --help`.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        arguments: The words after ``scoped-fn``; None reads them from `sys.argv`.

    Returns:
        0; 1 where a command cannot go on; 2 for a bad option or file; 130 after Ctrl-C.
    """
    parser = build_parser()
    try:
        chosen = parser.parse_args(arguments)
        if chosen.command is None:
            parser.print_help()
            return 0
        return run_command(chosen)
    except CommandError as error:
        sys.stderr.write(f"scoped-fn: {error}\n")
        return 2 if isinstance(error, UsageError) else 1
    except OSError as error:  # a full disk, a closed output
        sys.stderr.write(f"scoped-fn: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("scoped-fn: interrupted.\n")
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    parser = _Parser(prog="scoped-fn", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"scoped-fn {sf.__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    _add_train_options(commands.add_parser("train", help="train a small GPT on real text", description=TRAIN))
    profile = commands.add_parser("profile", help="show time and memory of a step, node by node", description=PROFILE)
    _add_profile_options(profile)
    inspect = commands.add_parser("inspect", help="show what a saved run or model holds", description=INSPECT)
    inspect.add_argument("file", type=Path, metavar="FILE", help="loaded as data: nothing in it is executed")
    commands.add_parser("doctor", help="show versions, device and which backends work here", description=DOCTOR)
    tune = commands.add_parser("tune", help="tune the FP8 kernels for this GPU", description=TUNE)
    tune.add_argument("--table", type=Path, metavar="FILE", help="the table to rewrite (default: the library's own)")
    return parser


def run_command(chosen: argparse.Namespace) -> int:
    """Runs the command that was chosen and returns its exit code."""
    if chosen.command == "doctor":
        from scoped_fn.doctor import run_doctor

        return run_doctor(sys.stdout)
    if chosen.command == "tune":
        from scoped_fn.tune import run_tune

        return run_tune(sys.stdout, chosen.table)
    # Imported here: matplotlib and rich take a second that `--help` and `doctor` need not wait for.
    if chosen.command == "inspect":
        from scoped_fn.demo.saved_tables import run_inspect

        return run_inspect(chosen.file)
    if chosen.command == "profile":
        from scoped_fn.demo.profile_run import run_profile

        return run_profile(ProfileOptions(**_with_model(chosen)))
    return _run_train(TrainOptions(**_with_model(chosen)))


def _run_train(options: TrainOptions) -> int:
    if options.compare:
        from scoped_fn.demo.compare import run_comparison

        return run_comparison(options)
    from scoped_fn.demo.job import run_training

    return run_training(options)


def _add_train_options(parser: argparse.ArgumentParser) -> None:
    default = TrainOptions()
    add = parser.add_argument
    add("--steps", type=_whole_number(1), default=default.steps, metavar="N", help="in all (default: %(default)s)")
    add("--backend", choices=("inductor", "eager"), default=default.backend, help="default: %(default)s")
    _add_recipe_options(parser)
    dropout_help = "probability of dropping what a layer adds, in training (default: %(default)s)"
    add("--dropout", type=_probability, default=default.model.dropout, metavar="P", help=dropout_help)
    schedule_help = f"passes from a step on, as 0:none,50:memory_budget=0.5; passes: {PASS_WORDS}, joined with +"
    add("--schedule", type=_words_of(parse_schedule), metavar="STEP:PASSES,...", help=schedule_help)
    add("--out", type=Path, default=default.out, metavar="FOLDER", help="for the results (default: %(default)s)")
    add("--checkpoint", type=Path, metavar="FILE", help="saved to as the run goes; resumed from where it exists")
    resume_help = (
        "go on with the run of a file, which has to exist, and save to it; to --checkpoint where that is given"
    )
    add("--resume", type=Path, metavar="FILE", help=resume_help)
    add("--no-timing", dest="timing", action="store_false", help="do not time steps at the end")
    _add_model_options(parser)


def _add_profile_options(parser: argparse.ArgumentParser) -> None:
    default = ProfileOptions()
    add = parser.add_argument
    backend_help = "what the graphs are lowered for (default: %(default)s)"
    add("--backend", choices=("inductor", "eager"), default=default.backend, help=backend_help)
    recipe_help = "how matmuls are quantized to FP8 (default: %(default)s)"
    add("--recipe", choices=RECIPES, default=default.recipe, help=recipe_help)
    passes_help = f"also profile the step with these: {PASS_WORDS}, joined with +"
    add("--passes", type=_words_of(parse_passes), metavar="PASSES", help=passes_help)
    add("--out", type=Path, default=default.out, metavar="FOLDER", help="for the results (default: %(default)s)")
    add("--top", type=_whole_number(1), default=default.top, metavar="N", help="rows of a table (default: %(default)s)")
    _add_model_options(parser)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds what a training run and a profile of one step have in common."""
    default, size = TrainOptions(), _whole_number(1)
    width = _whole_number(HEAD_WIDTH, multiple_of=HEAD_WIDTH)
    add = parser.add_argument
    add("--seed", type=_whole_number(0, below=2**32), default=default.seed, metavar="N", help="default: %(default)s")
    add("--text", type=Path, metavar="FILE", help="text to train on (default: the manual that comes with Python)")
    add("--batch", type=size, default=default.batch, metavar="N", help="examples in a step (default: %(default)s)")
    add("--context", type=size, default=default.model.context, metavar="N", help="bytes of one (default: %(default)s)")
    add("--layers", type=size, default=default.model.layers, metavar="N", help="of the model (default: %(default)s)")
    add("--width", type=width, default=default.model.width, metavar="N", help="of the model (default: %(default)s)")


def _add_recipe_options(parser: argparse.ArgumentParser) -> None:
    either = parser.add_mutually_exclusive_group()
    recipe_help = "how matmuls are quantized to FP8 (default: %(default)s)"
    either.add_argument("--recipe", choices=RECIPES, default=UNQUANTIZED, help=recipe_help)
    compare_help = "train with every recipe on the same batches; table, picture and numbers side by side"
    either.add_argument("--compare", action="store_true", help=compare_help)


def _whole_number(least: int, *, below: int | None = None, multiple_of: int = 1) -> Callable[[str], int]:
    wanted = f"a whole number of at least {least}"
    wanted += "" if below is None else f" and below {below}"
    wanted += "" if multiple_of == 1 else f" that {multiple_of} divides"

    def parse(word: str) -> int:
        try:
            number = int(word)
        except ValueError:
            number = least - 1
        if number < least or (below is not None and number >= below) or number % multiple_of:
            raise argparse.ArgumentTypeError(f"Expected {wanted}, got {word!r}")
        return number

    return parse


def _probability(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"Expected a number from 0 to below 1, got {word!r}")
    return number


def _words_of(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """Returns a parser of an option's text whose complaints argparse shows."""

    def convert(text: str) -> Parsed:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _with_model(chosen: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that were chosen, those of the model as one."""
    given = vars(chosen).copy()
    del given["command"]
    model = GPTConfig(**{name: given.pop(name) for name in ("layers", "width", "context", "dropout") if name in given})
    return {**given, "model": model}
