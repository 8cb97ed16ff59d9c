"""What ``scoped-fn profile`` says in words: tables of totals and of nodes, and a file of numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

import scoped_fn as sf
from scoped_fn.demo.profile_options import ProfileOptions
from scoped_fn.demo.profile_peak import Holding, Key

MEBIBYTE = 2**20
NUMBERS: tuple[tuple[str, Callable[[sf.Profile], float], str], ...] = (
    ("nodes", lambda profile: len(profile.nodes), "{}"),
    ("time of all nodes (ms)", lambda profile: 1e3 * profile.seconds, "{:.1f}"),
    ("parameters and inputs (MiB)", lambda profile: profile.argument_bytes / MEBIBYTE, "{:.2f}"),
    ("kept for the backward (MiB)", lambda profile: profile.saved_bytes / MEBIBYTE, "{:.2f}"),
    ("peak beside parameters and inputs (MiB)", lambda profile: profile.peak_bytes / MEBIBYTE, "{:.2f}"),
)
FACTS: tuple[tuple[str, Callable[[sf.Profile], str]], ...] = (
    ("peak at", lambda profile: profile.peak_node.name if profile.peak_node else "no node"),
    ("inputs", lambda profile: "made up" if profile.synthetic else "real"),
    ("complete", lambda profile: "yes" if profile.complete else f"no: {profile.error}"),
)


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
    last, which = steps[-1], "" if len(steps) == 1 else ", with passes"
    time, memory = f"Most time{which}", f"Most memory at the peak{which}"
    for table in (_totals(steps), _slowest(time, last, options.top), _largest(memory, last, options.top)):
        console.print(table)
        console.print()
    for remark in last.remarks:
        console.print(f"Note: {remark}", markup=False, highlight=False)


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
    table = _table("One training step", ["", *(each.words.replace("+", "\n+") for each in steps)], texts=1)
    for name, number, form in NUMBERS:
        values = [number(each.profile) for each in steps]
        table.add_row(name, *(form.format(value) + _change(values[0], value) for value in values))
    for name, tell in FACTS:
        table.add_row(name, *(Text(tell(each.profile)) for each in steps))
    return table


def _slowest(title: str, step: Profiled, rows: int) -> Table:
    profile = step.profile
    table = _table(title, ["node", "module", "graph", "ms", "part", "allocates\n(MiB)"], texts=3)
    for node in (shown := profile.slowest(rows)):
        time = (f"{1e3 * node.seconds:.2f}", f"{node.seconds / profile.seconds:.1%}")
        module = step.modules.get((node.graph, node.name), "")
        table.add_row(node.name, module, node.graph, *time, _mebibytes(node.bytes))
    left = profile.seconds - sum(node.seconds for node in shown)
    if len(shown) < len(profile.nodes):
        others = f"{len(profile.nodes) - len(shown)} others"
        table.add_row(others, "", "", f"{1e3 * left:.2f}", f"{left / profile.seconds:.1%}", "")
    return table


def _largest(title: str, step: Profiled, rows: int) -> Table:
    table = _table(title, ["node", "module", "graph", "MiB", "part"], texts=3)
    for each in step.held[:rows]:
        part = f"{each.bytes / step.profile.peak_bytes:.1%}"
        table.add_row(each.name, each.module, each.graph, _mebibytes(each.bytes), part)
    if left := step.held[rows:]:
        size = sum(each.bytes for each in left)
        part = f"{size / step.profile.peak_bytes:.1%}"
        table.add_row(f"{len(left)} others", "", "", _mebibytes(size), part)
    return table


def _table(title: str, headings: Sequence[str], *, texts: int) -> Table:
    """Returns a table whose columns after the first `texts` are numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.show_edge = table.pad_edge = False  # room for the names of nodes in a terminal's 80 columns
    for index, heading in enumerate(headings):
        side: JustifyMethod = "left" if index < texts else "right"
        table.add_column(heading, justify=side, overflow="fold", no_wrap=heading == "module")
    return table


def _change(plain: float, value: float) -> str:
    return "" if plain == value or not plain else f" ({value / plain - 1:+.0%})"


def _mebibytes(count: int) -> str:
    return f"{count / MEBIBYTE:.2f}"
