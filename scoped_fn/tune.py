"""``scoped-fn tune``: times the neighbours of each launch configuration on this GPU, and rewrites the table of them."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from scoped_fn.demo.errors import CommandError
from scoped_fn.kernels import _tiles as tiles
from scoped_fn.kernels._tiles import TILES, Tile
from scoped_fn.tune_cases import Case, cases

BEGIN, END = "# The table begins.\n", "# The table ends.\n"
GAIN = 0.98  # a neighbour must be this much faster, or the table would follow the noise
Key = tuple[str, str, str, str]


def run_tune(out: TextIO, path: Path | None) -> int:
    """Tunes every kernel on the current GPU, writes the table, and returns the exit code 0.

    Args:
        out: For one line a kernel, as soon as it is tuned.
        path: The file to rewrite; None for the library's own table.

    Raises:
        CommandError: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise CommandError(
            "Expected a GPU that torch can use, got none. Run `scoped-fn doctor` to see what torch finds."
        )
    from scoped_fn.kernels.gpu.launch import arch_of
    from scoped_fn.kernels.gpu.timing import median_us

    arch = arch_of(torch.empty(0, device="cuda"))
    target = path or Path(tiles.__file__)
    best: dict[Key, Tile] = {}
    for case in (case for case in cases() if case.vary):
        tile = tiles.tile_for(case.kernel, case.rows, case.columns, variant=case.variant, arch=arch)
        chosen, before_us, after_us = tune(case, tile, median_us)
        key = (case.kernel, case.variant, tiles.size_of(case.kernel, case.rows, case.columns), arch)
        best[key] = chosen
        write_table(target, {**TILES, **best})  # after each, so that an interruption loses nothing
        out.write(f"{' '.join(filter(None, key)):<48} {before_us:9.1f} -> {after_us:9.1f} us  {show(chosen)}\n")
        out.flush()
    out.write(f"Wrote {target}.\n")
    return 0


def tune(case: Case, tile: Tile, measure_us: Callable[[Callable[[], object]], float]) -> tuple[Tile, float, float]:
    """Returns the fastest configuration that a walk over neighbours finds, and the microseconds before and after.

    A neighbour that does not compile, or whose results differ from those of the tile at hand, is passed over.
    """
    run = case.prepare()
    want = run(tile)
    before_us = best_us = measure_us(lambda: run(tile))

    def time_us(other: Tile) -> float:
        try:
            right = same(run(other), want, exact=case.exact)
            return measure_us(lambda: run(other)) if right else math.inf
        except torch.AcceleratorError:
            raise  # nothing runs on this GPU any more
        except Exception:  # noqa: BLE001 - Triton has many ways to refuse a configuration
            return math.inf

    while found := next(
        ((other, us) for other in neighbours(tile, case.vary) if (us := time_us(other)) < GAIN * best_us), None
    ):
        tile, best_us = found
    return tile, before_us, best_us


def neighbours(tile: Tile, vary: tuple[str, ...]) -> Iterator[Tile]:
    """Yields the configurations that differ in one of some fields, halved or doubled (stages: one more or less)."""
    for name in vary:
        value = getattr(tile, name)
        others = (value + 1, value - 1) if name == "stages" else (2 * value, value // 2)
        yield from (replace(tile, **{name: other}) for other in others if other >= 1)


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], *, exact: bool) -> bool:
    """Returns whether results are equal, to the last bit or within the rounding of a sum in another order."""
    if exact:
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))
    pairs = ((a.float(), b.float()) for a, b in zip(got, want, strict=True))
    return all(bool((a - b).norm() <= 1e-2 * b.norm()) for a, b in pairs)


def show(tile: Tile) -> str:
    """Returns a configuration as the table has it, without what is as by default."""
    default = Tile()
    given = [(f.name, getattr(tile, f.name)) for f in fields(tile)]
    return f"Tile({', '.join(f'{name}={value}' for name, value in given if value != getattr(default, name))})"


def write_table(path: Path, table: Mapping[Key, Tile]) -> None:
    """Rewrites what stands between the marks of a file, at once: an interruption leaves the old file."""
    source = path.read_text()
    head, rest = source.split(BEGIN)
    _, tail = rest.split(END)
    rows = "".join(f"        ({', '.join(_quoted(part) for part in key)}): {show(t)},\n" for key, t in table.items())
    start = "TILES: Final[Mapping[tuple[str, str, str, str], Tile]] = MappingProxyType(\n    {\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".py", delete=False) as new:
        new.write(f"{head}{BEGIN}{start}{rows}    }}\n)\n{END}{tail}")
    shutil.copymode(path, new.name)
    os.replace(new.name, path)


def _quoted(word: str) -> str:
    return f'"{word}"'
