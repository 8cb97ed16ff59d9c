"""The picture of ``scoped-fn train --compare``: loss curves of all recipes, and scales over time below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scoped_fn.demo.compare_report import LAST_STEPS, Contender, Traces
from scoped_fn.demo.precision import RECIPES, ROLES, UNQUANTIZED
from scoped_fn.demo.report import smoothed

# Black for the reference; the others are told apart by color-blind readers too (Okabe and Ito's palette).
RECIPE_COLORS = ("black", "#0072B2", "#E69F00", "#009E73", "#CC79A7")
ROLE_COLORS = ("#0072B2", "#D55E00", "#009E73")


def draw_comparison(path: Path, contenders: Sequence[Contender]) -> None:
    """Draws losses, their distance from the unquantized run, and the scales of a few sites, into a PNG."""
    traces = next((each.traces for each in contenders if each.traces), {})
    # A Figure of its own: pyplot would keep it, and a chosen backend, in global state.
    figure = Figure(figsize=(12, 8 if traces else 4.5), layout="constrained")
    rows = figure.subfigures(2 if traces else 1, 1, squeeze=False)[:, 0]
    losses, distances = rows[0].subplots(1, 2)
    _draw_losses(losses, contenders)
    _draw_distances(distances, contenders)
    if traces:
        below = rows[1].subplots(1, len(traces), sharey=True, squeeze=False)[0]
        _draw_traces(below, traces)
        rows[1].suptitle("Delayed scaling: the scale of a tensor at three sites, x_fp8 = saturate(x * scale)")
        rows[1].legend(*below[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ROLES))
    figure.savefig(path, dpi=120)


def _draw_losses(axes: Axes, contenders: Sequence[Contender]) -> None:
    for each in contenders:
        wide = each.recipe == UNQUANTIZED  # below the others, which hardly differ from it
        axes.plot(
            range(1, len(each.losses) + 1),
            smoothed(each.losses),
            color=_color(each),
            linewidth=4 if wide else 1.3,
            alpha=0.35 if wide else 1,
            label=f"{each.recipe}: {each.final_loss:.3f}",
        )
    axes.set(title="Loss, mean of neighbouring steps", xlabel="step", ylabel="loss (nats per byte)")
    axes.legend(title="recipe: final loss")
    axes.grid(alpha=0.3)


def _draw_distances(axes: Axes, contenders: Sequence[Contender]) -> None:
    reference = next((_trailing(each.losses) for each in contenders if each.recipe == UNQUANTIZED), [])
    axes.axhline(0, color="black", linewidth=4, alpha=0.35, label=UNQUANTIZED)
    for each in contenders:
        if each.recipe != UNQUANTIZED:
            pairs = zip(_trailing(each.losses), reference, strict=False)  # a run may have been stopped early
            percent = [100 * (loss / other - 1) for loss, other in pairs]
            axes.plot(range(1, len(percent) + 1), percent, color=_color(each), linewidth=1.3, label=each.recipe)
    axes.set(
        title=f"Against the unquantized run, mean of {LAST_STEPS} steps",
        xlabel="step",
        ylabel="difference of the loss (percent)",
    )
    axes.legend(title="recipe")
    axes.grid(alpha=0.3)


def _draw_traces(panels: Sequence[Axes], traces: Traces) -> None:
    for axes, (site, roles) in zip(panels, traces.items(), strict=True):
        for role, color in zip(ROLES, ROLE_COLORS, strict=True):
            if role in roles:
                axes.plot(range(1, len(roles[role]) + 1), roles[role], color=color, linewidth=1.3, label=role)
        axes.set(title=site, xlabel="step", yscale="log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("scale after the step")


def _trailing(losses: Sequence[float]) -> list[float]:
    """Returns for each step the mean up to it, which ends in the final loss of the table."""
    windows = (losses[max(0, end - LAST_STEPS) : end] for end in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]


def _color(contender: Contender) -> str:
    return RECIPE_COLORS[RECIPES.index(contender.recipe)]
