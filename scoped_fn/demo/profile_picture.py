"""The picture of ``scoped-fn profile``: how much memory is in use along the nodes of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

import scoped_fn as sf

# Told apart by color-blind readers too (Okabe and Ito's palette).
COLORS = ("#0072B2", "#D55E00", "#009E73")
FORWARD_SHADE, BACKWARD_SHADE = "#56B4E9", "#E69F00"
MEBIBYTE = 2**20


def draw_timeline(path: Path, profiles: Mapping[str, sf.Profile]) -> None:
    """Draws the memory in use along the nodes of one profile, or of several on top of each other, into a PNG.

    Nodes are counted from the first one of the backward, so that all profiles have it in the same place, also where
    passes add nodes to the forward.

    Args:
        path: The file.
        profiles: Profiles of the same model, by what the legend calls them; at most three.

    Example:
        >>> import torch
        >>> state, fn = sf.compile(sf.init_state(), lambda x: (x * 2).sin(), (torch.ones(64),), backend="eager")
        >>> state, profile = sf.profile(state, fn)
        >>> draw_timeline(Path("memory.png"), {"without passes": profile})
    """
    # A Figure of its own: pyplot would keep it, and a chosen backend, in global state.
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.add_subplot()
    _shade(axes, list(profiles.values()))
    for (words, profile), color in zip(profiles.items(), COLORS, strict=False):
        _draw(axes, profile, color, words)
    for profile, color in zip(profiles.values(), COLORS, strict=False):
        _mark_peak(axes, profile, color)
    highest = max(each.peak_bytes for each in profiles.values()) / MEBIBYTE
    axes.set(xlabel="node, counted from the first one of the backward", ylabel="memory in use (MiB)")
    axes.set(title="Memory beside parameters and inputs (line: while a node runs; filled: after it)")
    axes.set_ylim(0, 1.2 * highest or 1)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center")
    figure.savefig(path, dpi=120)


def _shade(axes: Axes, profiles: Sequence[sf.Profile]) -> None:
    start = min(-_forward_length(each) for each in profiles)
    end = max(len(each.nodes) - _forward_length(each) for each in profiles)
    for at, to, shade, word in ((start, 0, FORWARD_SHADE, "forward"), (0, end, BACKWARD_SHADE, "backward")):
        if at < to:
            axes.axvspan(at, to, color=shade, alpha=0.12, linewidth=0)
            middle = (at + to) / 2
            axes.text(middle, 0.97, word, transform=axes.get_xaxis_transform(), ha="center", va="top", color="dimgray")
    axes.set_xlim(start, max(end, start + 1))


def _draw(axes: Axes, profile: sf.Profile, color: str, words: str) -> None:
    start = -_forward_length(profile)
    edges = range(start, start + len(profile.nodes) + 1)
    label = f"{words}: peak {profile.peak_bytes / MEBIBYTE:.1f} MiB, kept {profile.saved_bytes / MEBIBYTE:.1f} MiB"
    during = [node.peak_bytes / MEBIBYTE for node in profile.nodes]
    after = [node.live_bytes / MEBIBYTE for node in profile.nodes]
    axes.stairs(after, edges, color=color, alpha=0.18, fill=True)
    axes.stairs(during, edges, color=color, linewidth=1.2, baseline=None, label=label)


def _mark_peak(axes: Axes, profile: sf.Profile, color: str) -> None:
    peak = profile.peak_node
    if peak is None:
        return
    x, y = profile.nodes.index(peak) - _forward_length(profile) + 0.5, peak.peak_bytes / MEBIBYTE
    axes.plot([x], [y], marker="v", color=color, markeredgecolor="white", markersize=9)
    text = axes.annotate(f"{peak.name}: {y:.1f} MiB", (x, y), textcoords="offset points", xytext=(0, 9), ha="center")
    text.set(color=color, path_effects=[withStroke(linewidth=3, foreground="white")])


def _forward_length(profile: sf.Profile) -> int:
    return sum(node.graph != "backward" for node in profile.nodes)
