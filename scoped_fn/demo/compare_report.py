"""What ``scoped-fn train --compare`` leaves behind in words: a table, and a file of numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.precision import UNQUANTIZED, RoleScales

LAST_STEPS = 20

Traces = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Contender:
    """The results of one recipe; losses are in nats a byte.

    Attributes:
        recipe: Its name.
        planned_steps: Steps asked for.
        losses: The loss of each step.
        compile_s: Seconds of compiling.
        training_s: Seconds of training.
        validation_loss: Mean loss over the validation text after the last step; None where not measured.
        saved_bytes: Bytes that a step keeps from its forward for its backward; None where not measured.
        step_ms: Median milliseconds of a forward and backward; None where not measured.
        scales: Amaxes and scales by role after the last step; empty where the recipe remembers none.
        traces: Site -> role -> the scale after each step, of a few sites.
    """

    recipe: str
    planned_steps: int
    losses: tuple[float, ...]
    compile_s: float
    training_s: float
    validation_loss: float | None = None
    saved_bytes: int | None = None
    step_ms: float | None = None
    scales: tuple[RoleScales, ...] = ()
    traces: Traces = field(default_factory=dict)

    @property
    def final_loss(self) -> float:
        """The mean loss of the last steps: one step's is noisy."""
        last = self.losses[-LAST_STEPS:]
        return sum(last) / len(last)

    @property
    def finished(self) -> bool:
        """Whether every step was made."""
        return len(self.losses) >= self.planned_steps


def excess(contender: Contender, contenders: Sequence[Contender]) -> float | None:
    """Returns by what part the final loss is above the unquantized one; None where runs of equal length lack."""
    reference = next((each for each in contenders if each.recipe == UNQUANTIZED), None)
    if reference is None or reference is contender or not (reference.finished and contender.finished):
        return None
    return contender.final_loss / reference.final_loss - 1


def print_comparison(console: Console, contenders: Sequence[Contender], options: TrainOptions) -> None:
    """Prints a row for each recipe, and below the scales of those that remember some."""
    title = f"scoped-fn train --compare: {options.steps} steps, seed {options.seed}, {options.backend}"
    table = Table(title=title, title_justify="left")
    table.add_column("recipe", no_wrap=True)
    for heading in ("final loss", "against none", "validation", "step (ms)", "kept (MiB)"):
        table.add_column(heading, justify="right")
    for each in contenders:
        table.add_row(*_row(each, contenders))
    console.print(table)
    for each in contenders:
        if each.scales:
            console.print(_scale_table(each))


def write_comparison(path: Path, contenders: Sequence[Contender], options: TrainOptions) -> None:
    """Writes all numbers as JSON."""
    runs = [{**asdict(each), "final_loss": each.final_loss, "excess": excess(each, contenders)} for each in contenders]
    settings = {"seed": options.seed, "backend": options.backend, "steps": options.steps, "batch": options.batch}
    content = {**settings, "model": asdict(options.model), "runs": runs}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _row(contender: Contender, contenders: Sequence[Contender]) -> list[str]:
    above, kept = excess(contender, contenders), contender.saved_bytes
    part = "" if contender.finished else f" ({len(contender.losses)}/{contender.planned_steps})"
    return [
        contender.recipe + part,
        f"{contender.final_loss:.4f}",
        "" if above is None else f"{above:+.2%}",
        _number(contender.validation_loss, ".4f"),
        _number(contender.step_ms, ".1f"),
        _number(None if kept is None else kept / 2**20, ".2f"),
    ]


def _scale_table(contender: Contender) -> Table:
    table = Table(title=f"{contender.recipe}: after the last step", title_justify="left")
    table.add_column("tensor")
    for heading in ("sites", "least amax", "greatest amax", "least scale", "greatest scale"):
        table.add_column(heading, justify="right")
    for each in contender.scales:
        table.add_row(each.role, str(each.sites), *(f"{number:.4g}" for number in (*each.amax, *each.scale)))
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
