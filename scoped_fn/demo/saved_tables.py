"""``scoped-fn inspect``: a saved run or model as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text
from torch import Tensor

from scoped_fn.demo.report import printable
from scoped_fn.demo.saved_run import SavedRun
from scoped_fn.demo.state_rows import state_rows
from scoped_fn.inspect_file import SavedEngine, SavedValue, ScaleRow, read_saved, scale_rows
from scoped_fn.state import CompilerState, Fp8State

LAST_LOSSES = 5
MOST_ROWS, MOST_CHARACTERS = 50, 200
BY_DTYPE = ("dtype", "tensors", "elements")


def run_inspect(path: Path) -> int:
    """Prints what a file holds, as tables, and returns the exit code 0.

    Raises:
        UsageError: The file cannot be read, or is neither a file of `save` nor a saved `Engine`.
    """
    console = Console()
    for table in tables_of(read_saved(path)):
        console.print(table)
        console.print()
    return 0


def tables_of(saved: SavedValue | SavedEngine) -> Iterator[Table]:
    """Yields the tables that show a saved value or model."""
    if isinstance(saved, SavedEngine):
        entries = ("name", "shape", "dtype", "elements")
        yield _table("entries", entries, map(_entry, saved.params.items()), numbers=1)
        yield _table("elements by dtype", BY_DTYPE, _by_dtype(saved.params), numbers=2)
        yield from _scales(saved.scales, "")
        return
    yield _table("file", ("", ""), _file(saved))
    if saved.run is not None:
        yield _table("settings", ("", ""), saved.run.settings.items())
        yield _table("progress", ("", ""), _progress(saved.run))
    elif saved.plain:
        yield _table("plain data", ("", ""), _plain(saved.plain))
    for path, state in saved.states.items():
        yield _table(f"state{_at(path)}", ("", ""), state_rows(state))
    if saved.tensors:
        yield _table("tensors", ("name", "shape", "dtype", "bytes"), map(_tensor, saved.tensors.items()), numbers=1)
        counted = "elements by dtype" if saved.run is None else "elements of parameters by dtype"
        yield _table(counted, BY_DTYPE, _by_dtype(_counted(saved)), numbers=2)
    for path, state in saved.states.items():
        for token, held in _different_scales(state).items():
            alone = len(state.fp8) == len(saved.states) == 1
            yield from _scales(scale_rows(held), "" if alone else f" of owner {token}{_at(path)}")


def _file(saved: SavedValue) -> Iterator[tuple[str, str]]:
    yield "schema", f"{saved.schema}"
    yield "tensors", f"{len(saved.tensors)}"
    yield "bytes of tensors", f"{sum(map(_bytes, saved.tensors.values())):,}"


def _counted(saved: SavedValue) -> Mapping[str, Tensor]:
    """Returns the tensors whose elements are of interest: of a run the parameters."""
    return saved.tensors if saved.run is None else saved.run.params


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _plain(plain: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for path, value in islice(plain.items(), MOST_ROWS):
        text = repr(value)
        yield path, text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
    if len(plain) > MOST_ROWS:
        yield "...", f"and {len(plain) - MOST_ROWS} more"


def _progress(saved: SavedRun) -> Iterator[tuple[str, str]]:
    yield "steps", f"{len(saved.losses)}"
    yield "optimizer updates", f"{saved.moments.count}"
    if saved.losses:
        yield "first loss", f"{saved.losses[0]:.4f}"
        yield "last losses", "  ".join(f"{loss:.4f}" for loss in saved.losses[-LAST_LOSSES:])


def _entry(named: tuple[str, Tensor]) -> tuple[str, str, str, str]:
    name, value = named
    return name, str(list(value.shape)), _dtype(value), f"{value.numel():,}"


def _tensor(named: tuple[str, Tensor]) -> tuple[str, str, str, str]:
    return *_entry(named)[:3], f"{_bytes(named[1]):,}"


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _different_scales(state: CompilerState) -> dict[int, Fp8State]:
    """Returns the scales by owner, those that several share once."""
    first = {id(held): token for token, held in reversed(list(state.fp8.items()))}
    return {token: held for token, held in state.fp8.items() if first[id(held)] == token}


def _scales(rows: Sequence[ScaleRow], of: str) -> Iterator[Table]:
    if rows:
        headings = ("site", "role", "scale", "newest\namax", "greatest\namax", "steps")
        yield _table(f"FP8 scales{of}", headings, map(_scale, rows), numbers=4)


def _by_dtype(params: Mapping[str, Tensor]) -> Iterator[tuple[str, str, str]]:
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
    shown = Text(_shown(title), style="table.title")
    table = Table(title=shown, title_justify="left", show_header=any(headings), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.min_width = min(shown.cell_len, 80)  # else the title of a narrow table is broken
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
