"""How the benchmarks measure: side by side, in turn, medians; and one table for all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was measured.
        baseline: What it is compared with.
        ours: Our figure, with its unit.
        theirs: The baseline's figure, with its unit.
        ratio: Ours divided by the baseline's; for counts, ours itself.
        bar: The greatest ratio (or count) that is good enough.
    """

    what: str
    baseline: str
    ours: str
    theirs: str
    ratio: float
    bar: float

    @property
    def passed(self) -> bool:
        return self.ratio <= self.bar


def medians_us(contestants: dict[str, Callable[[], object]], *, rounds: int, calls: int = 1) -> dict[str, float]:
    """Median microseconds a call of each contestant, measured in turn so that other load falls on all alike.

    Each round times ``calls`` calls of every contestant, one contestant after the other; the order rotates.
    """
    for run in contestants.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for round_number in range(rounds):
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            run = contestants[name]
            started = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append(1e6 * (time.perf_counter() - started) / calls)
    return {name: statistics.median(each) for name, each in times.items()}


def print_table(rows: list[Row]) -> bool:
    """Prints the table; returns whether every bar is met."""
    table = Table(title=f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians, side by side")
    for column in ("what", "baseline", "ours", "theirs", "ratio", "bar", ""):
        table.add_column(column, justify="left" if column in ("what", "baseline") else "right")
    for row in rows:
        mark = "[green]ok" if row.passed else "[red]above"
        table.add_row(row.what, row.baseline, row.ours, row.theirs, f"{row.ratio:.2f}", f"{row.bar:.2f}", mark)
    Console(width=140).print(table)
    return all(row.passed for row in rows)
