"""What a training run leaves behind: a table, a picture of the loss, and a file of numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scoped_fn.demo.changes import Change
from scoped_fn.demo.precision import UNQUANTIZED, RoleScales

NEIGHBOURS = 10


@dataclass(frozen=True)
class Summary:
    """The results of a run; losses are in nats a byte.

    Attributes:
        seed: The run's seed.
        backend: The backend that ran it.
        recipe: How matmuls were quantized; "none" for not at all.
        planned_steps: Steps asked for.
        losses: The loss of each step, those of a resumed checkpoint included.
        compile_s: Seconds of compiling.
        training_s: Seconds of the steps made in this process.
        tokens_per_second: Their speed.
        validation_loss: Mean loss over the validation text after the last step; None where not measured.
        sample: Text the model wrote.
        step_ms: Median milliseconds of a forward and backward by contestant; empty where not measured.
        scales: Amaxes and scales by role after the last step; empty where the recipe remembers none.
        schedule: The entries of the schedule that came into force in this process, in order.
    """

    seed: int
    backend: str
    recipe: str
    planned_steps: int
    losses: tuple[float, ...]
    compile_s: float
    training_s: float
    tokens_per_second: float
    validation_loss: float | None = None
    sample: str = ""
    step_ms: dict[str, float] = field(default_factory=dict)
    scales: tuple[RoleScales, ...] = ()
    schedule: tuple[Change, ...] = ()


def printable(content: bytes) -> str:
    """Returns bytes as text for a terminal: a dot in place of what is no character that can be seen."""
    text = content.decode("utf-8", errors="replace").replace("\N{REPLACEMENT CHARACTER}", ".")
    return "".join(letter if letter.isprintable() or letter == "\n" else "." for letter in text)


def print_table(console: Console, summary: Summary) -> None:
    """Prints the results; the sampled text as it is, never as markup."""
    table = Table(title="scoped-fn train", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(summary):
        encodable = value.encode(console.encoding, "replace").decode(console.encoding)
        table.add_row(name, Text(encodable))
    console.print(table)


def write_metrics(path: Path, summary: Summary) -> None:
    """Writes the summary as JSON."""
    path.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")


def draw_losses(path: Path, summary: Summary) -> None:
    """Draws the loss of each step, its mean over neighbouring steps and the validation loss into a PNG."""
    # A Figure of its own: pyplot would keep it, and a chosen backend, in global state.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(summary.losses) + 1)
    axes.plot(steps, summary.losses, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
    axes.plot(
        steps, smoothed(summary.losses), color="tab:blue", linewidth=2, label=f"mean of {2 * NEIGHBOURS + 1} steps"
    )
    if summary.validation_loss is not None:
        label = f"validation after the last step: {summary.validation_loss:.2f}"
        axes.axhline(summary.validation_loss, color="tab:orange", linestyle="--", label=label)
    axes.set(title="Loss of scoped-fn train", xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _rows(summary: Summary) -> list[tuple[str, str]]:
    made, planned = len(summary.losses), summary.planned_steps
    speed = f"{summary.training_s:.1f} s, {summary.tokens_per_second:,.0f} tokens per second"
    rows = [
        ("recipe", summary.recipe if summary.recipe != UNQUANTIZED else f"{UNQUANTIZED} (unquantized)"),
        ("steps", f"{made}" if made >= planned else f"{made} of {planned}"),
        ("first loss", _loss(summary.losses[0])),
        ("last loss", _loss(summary.losses[-1])),
        ("validation loss", _loss(summary.validation_loss)),
        ("compile time", f"{summary.compile_s:.1f} s ({summary.backend})"),
        ("training time", speed if summary.tokens_per_second else "no step was left to make"),
    ]
    rows += [(f"from step {each.step}", f"{each.passes}: {each.effect}") for each in summary.schedule]
    rows += [(f"FP8, {each.role}", str(each)) for each in summary.scales]
    for name, milliseconds in summary.step_ms.items():
        ratio = summary.step_ms["scoped_fn"] / milliseconds
        against = "" if name == "scoped_fn" else f" (scoped_fn takes {ratio:.2f}x)"
        rows.append((f"step, {name}", f"{milliseconds:.1f} ms{against}"))
    return [*rows, ("sampled text", summary.sample.strip("\n"))]


def _loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f} nats per byte"


def smoothed(losses: Sequence[float]) -> list[float]:
    """Returns for each step the mean over as many steps before as after, so that it does not lag behind the fall."""
    last = len(losses) - 1
    reaches = (min(NEIGHBOURS, step, last - step) for step in range(len(losses)))
    around = [losses[step - reach : step + reach + 1] for step, reach in enumerate(reaches)]
    return [sum(each) / len(each) for each in around]
