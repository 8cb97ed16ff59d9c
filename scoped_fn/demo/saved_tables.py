"""``scoped-fn inspect``: a saved run or model as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text
from torch import Tensor

from scoped_fn.demo.adamw import Tensors
from scoped_fn.demo.report import printable
from scoped_fn.inspect_file import SavedEngine, SavedRun, ScaleRow, read_saved

LAST_LOSSES = 5


def run_inspect(path: Path) -> int:
    """Prints what a file holds, as tables, and returns the exit code 0.

    Raises:
        UsageError: The file cannot be read, or is neither a checkpoint nor a saved `Engine`.
    """
    console = Console()
    for table in tables_of(read_saved(path)):
        console.print(table)
        console.print()
    return 0


def tables_of(saved: SavedRun | SavedEngine) -> Iterator[Table]:
    """Yields the tables that show a saved run or model."""
    if isinstance(saved, SavedRun):
        yield _table("settings", ("", ""), saved.settings.items())
        yield _table("progress", ("", ""), _progress(saved))
    else:
        yield _table("entries", ("name", "shape", "dtype", "elements"), map(_entry, saved.params.items()), numbers=1)
    yield _table("elements by dtype", ("dtype", "tensors", "elements"), _by_dtype(saved.params), numbers=2)
    if saved.scales:
        headings = ("site", "role", "scale", "newest\namax", "greatest\namax", "steps")
        yield _table("FP8 scales", headings, map(_scale, saved.scales), numbers=4)


def _progress(saved: SavedRun) -> Iterator[tuple[str, str]]:
    yield "steps", f"{len(saved.losses)}"
    yield "optimizer updates", f"{saved.count}"
    if saved.losses:
        yield "first loss", f"{saved.losses[0]:.4f}"
        yield "last losses", "  ".join(f"{loss:.4f}" for loss in saved.losses[-LAST_LOSSES:])


def _entry(named: tuple[str, Tensor]) -> tuple[str, str, str, str]:
    name, value = named
    return name, str(list(value.shape)), _dtype(value), f"{value.numel():,}"


def _by_dtype(params: Tensors) -> Iterator[tuple[str, str, str]]:
    sizes: dict[str, list[int]] = defaultdict(list)
    for value in params.values():
        sizes[_dtype(value)].append(value.numel())
    for dtype, each in sizes.items():
        yield dtype, f"{len(each)}", f"{sum(each):,}"


def _scale(row: ScaleRow) -> tuple[str, ...]:
    numbers = (row.scale, row.newest_amax, row.window_amax)
    return row.site, row.role, *(f"{number:.4g}" for number in numbers), f"{row.steps}"


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: int = 0) -> Table:
    """Returns a table whose last columns are numbers; texts from a file are shown as they are, never as markup."""
    table = Table(title=title, title_justify="left", show_header=any(headings), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.show_edge = table.pad_edge = False  # room for the names of sites in a terminal's 80 columns
    for index, heading in enumerate(headings):
        side: JustifyMethod = "right" if index >= len(headings) - numbers else "left"
        table.add_column(heading, justify=side, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_shown(cell)) for cell in row))
    return table


def _shown(cell: object) -> str:
    """Returns a text as every terminal can show it."""
    return printable(str(cell).encode("ascii", "backslashreplace"))
