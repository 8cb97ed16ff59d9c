"""How a run shows that it is alive: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

LINES_PER_RUN = 20

Advance = Callable[[int, str], None]


@contextmanager
def phase(console: Console, description: str) -> Iterator[None]:
    """Shows work of unknown length until the block ends."""
    if not console.is_terminal:
        console.print(f"{description} ...")
        yield
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as bar:
        bar.add_task(description, total=None)
        yield


@contextmanager
def counted_phase(console: Console, description: str, *, done: int, total: int) -> Iterator[Advance]:
    """Shows work of known length; gives a function of the steps done and a text about the last of them."""
    if not console.is_terminal:
        yield _line_printer(console, description, total)
        return
    columns = (  # fewer than 80 letters in all: a line that wraps is drawn twice
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(description, total=total, completed=done, note="")
        yield lambda completed, note: bar.update(task, completed=completed, note=note)


def _line_printer(console: Console, description: str, total: int) -> Advance:
    started = time.perf_counter()
    every = max(1, total // LINES_PER_RUN)

    def advance(completed: int, note: str) -> None:
        if completed % every == 0 or completed in (1, total):
            elapsed = time.perf_counter() - started
            console.print(
                f"{description} {completed}/{total}  {note}  {elapsed:.0f} s", highlight=False, soft_wrap=True
            )

    return advance
