"""What ``scoped-fn profile`` says in words: tables of totals and of nodes, and a file of numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import scoped_fn as sf
from scoped_fn.demo.profile_options import ProfileOptions
from scoped_fn.demo.profile_peak import Holding, Key

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Profiled:
    """A training step, node by node.

    Attributes:
        words: Its passes in words.
        profile: What its nodes cost.
        held: What is in use at the peak, the largest first.
        modules: Where in the model each node is from.
        remarks: What the passes warned of, a line each.
    """

    words: str
    profile: sf.Profile
    held: tuple[Holding, ...] = ()
    modules: Mapping[Key, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def print_profiles(console: Console, steps: Sequence[Profiled], options: ProfileOptions) -> None:
    """Prints the totals of all steps side by side, and of the last one the nodes that matter most."""
    last = steps[-1]
    console.print(_totals(steps))
    for remark in last.remarks:
        console.print(f"Note: {remark}", markup=False, highlight=False)
    console.print(_slowest(last, options.top))
    console.print(_largest(last, options.top))


def write_profiles(path: Path, steps: Sequence[Profiled], options: ProfileOptions) -> None:
    """Writes all numbers as JSON."""
    settings = {"seed": options.seed, "backend": options.backend, "recipe": options.recipe, "batch": options.batch}
    found = [
        {
            "passes": each.words,
            "remarks": each.remarks,
            "profile": json.loads(each.profile.to_json()),
            "held_at_peak": [asdict(holding) for holding in each.held],
        }
        for each in steps
    ]
    content = {**settings, "model": asdict(options.model), "steps": found}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _totals(steps: Sequence[Profiled]) -> Table:
    table = _table("One training step", ["", *(each.words for each in steps)], texts=1)
    for name, tell in _ROWS:
        table.add_row(name, *(Text(tell(each.profile)) for each in steps))
    return table


_ROWS: tuple[tuple[str, Callable[[sf.Profile], str]], ...] = (
    ("nodes", lambda profile: f"{len(profile.nodes)}"),
    ("time of all nodes (ms)", lambda profile: f"{1e3 * profile.seconds:.1f}"),
    ("parameters and inputs (MiB)", lambda profile: _mebibytes(profile.argument_bytes)),
    ("kept for the backward (MiB)", lambda profile: _mebibytes(profile.saved_bytes)),
    ("peak beside parameters and inputs (MiB)", lambda profile: _mebibytes(profile.peak_bytes)),
    ("peak at node", lambda profile: profile.peak_node.name if profile.peak_node else "-"),
    ("inputs", lambda profile: "made up" if profile.synthetic else "real"),
    ("complete", lambda profile: "yes" if profile.complete else f"no: {profile.error}"),
)


def _slowest(step: Profiled, rows: int) -> Table:
    profile = step.profile
    table = _table(f"Most time, {step.words}", ["node", "module", "graph", "ms", "part", "allocates\n(MiB)"], texts=3)
    for node in profile.slowest(rows):
        part = node.seconds / profile.seconds
        module = step.modules.get((node.graph, node.name), "")
        table.add_row(
            node.name, module, node.graph, f"{1e3 * node.seconds:.2f}", f"{part:.1%}", _mebibytes(node.bytes)
        )
    return table


def _largest(step: Profiled, rows: int) -> Table:
    peak = step.profile.peak_node
    title = f"Most memory at the peak, {step.words}"
    table = _table(title, ["node", "module", "graph", "MiB", "part"], texts=3)
    for each in step.held[:rows]:
        part = each.bytes / max(step.profile.peak_bytes, 1)
        table.add_row(each.name, each.module, each.graph, _mebibytes(each.bytes), f"{part:.1%}")
    rest = step.held[rows:]
    return table


def _table(title: str, headings: Sequence[str], *, texts: int) -> Table:
    """Returns a table whose columns after the first `texts` are numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.show_edge = table.pad_edge = False  # room for the names of nodes in a terminal's 80 columns
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < texts else "right", overflow="fold")
    return table


def _mebibytes(count: int) -> str:
    return f"{count / MEBIBYTE:.2f}"
