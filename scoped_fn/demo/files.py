"""The files of a training run: folders before the work, results after it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from scoped_fn.demo.compare_picture import draw_comparison
from scoped_fn.demo.compare_report import Contender, write_comparison
from scoped_fn.demo.errors import UsageError
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.report import Summary, draw_losses, write_metrics


def make_folders(options: TrainOptions) -> None:
    """Makes the folders that results go to, so that a bad path fails before the work.

    Raises:
        UsageError: A path cannot be made or written to, or there is no file to resume from.
    """
    if options.resume is not None and not options.resume.exists():
        raise UsageError(f"Expected a file to resume from, got '{options.resume}': there is none. Check --resume.")
    make_folder(options.out, "--out")
    path, option = options.saves_to, "--resume" if options.checkpoint is None else "--checkpoint"
    if path is None:
        return
    make_folder(path.parent, option)
    if path.is_dir():
        raise UsageError(f"Expected a file, got the folder '{path}'. Check {option}.")


def write_comparison_files(contenders: Sequence[Contender], options: TrainOptions) -> str:
    """Writes picture and numbers of a comparison; returns the names of both, for a sentence."""
    picture, numbers = options.out / "comparison.png", options.out / "comparison.json"
    draw_comparison(picture, contenders)
    write_comparison(numbers, contenders, options)
    return f"{picture} and {numbers}"


def write_files(summary: Summary, options: TrainOptions) -> str:
    """Writes the picture and the numbers; returns the names of all files of the run, for a sentence."""
    picture, metrics = options.out / "loss.png", options.out / "metrics.json"
    draw_losses(picture, summary)
    write_metrics(metrics, summary)
    names = [str(path) for path in (options.saves_to, picture, metrics) if path is not None]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def make_folder(folder: Path, option: str) -> None:
    """Makes a folder to write to, that an option names.

    Raises:
        UsageError: It cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"Expected a folder, got '{folder}': {error.strerror}. Check {option}.") from None
    if not os.access(folder, os.W_OK):
        raise UsageError(f"Expected a folder to write to, got '{folder}'. Check {option}.")
