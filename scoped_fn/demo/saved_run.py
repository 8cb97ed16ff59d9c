"""A training run as one value, the content of its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import scoped_fn as sf
from scoped_fn.demo.adamw import Moments, Tensors
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.train import Carry

FORMAT = "scoped-fn train 2"
PARTS = frozenset({"format", "settings", "params", "count", "mean", "square", "losses", "state"})

Setting = int | float | str


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint of ``scoped-fn train`` holds.

    Attributes:
        settings: What the run was started with.
        params: The parameters by name.
        moments: The optimizer's moments.
        losses: The loss of each step, in nats a byte.
        state: The compiler's state.
    """

    settings: dict[str, Setting]
    params: Tensors
    moments: Moments
    losses: tuple[float, ...]
    state: sf.CompilerState


def content_of(carry: Carry, options: TrainOptions) -> dict[str, Any]:
    """Returns a run as a tree of states, tensors and plain data, to be saved."""
    return {
        "format": FORMAT,
        "settings": settings_of(options),
        "params": carry.params,
        "count": carry.moments.count,
        "mean": carry.moments.mean,
        "square": carry.moments.square,
        "losses": torch.tensor(carry.losses, dtype=torch.float64, device="cpu"),
        "state": carry.state,
    }


def settings_of(options: TrainOptions) -> dict[str, Setting]:
    """Returns what of the options a run cannot go on without."""
    model = asdict(options.model)
    del model["vocabulary"]
    return {"seed": options.seed, "batch": options.batch, "recipe": options.recipe, **model}


def run_of(content: Any) -> SavedRun | None:
    """Returns the run that a tree is; None if it is none."""
    if type(content) is not dict or content.get("format") != FORMAT or content.keys() != PARTS:
        return None
    settings, losses, state, count = (content[name] for name in ("settings", "losses", "state", "count"))
    named = [content[name] for name in ("params", "mean", "square")]
    if not (_are_settings(settings) and isinstance(state, sf.CompilerState) and type(count) is int):
        return None
    if not (all(map(are_tensors, named)) and isinstance(losses, Tensor)):
        return None
    if losses.dtype != torch.float64 or losses.dim() != 1:
        return None
    params, mean, square = named
    return SavedRun(settings, params, Moments(count, mean, square), tuple(losses.tolist()), state)


def are_tensors(content: Any) -> bool:
    """Returns whether a value is tensors by name."""
    if not isinstance(content, Mapping):
        return False
    return all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items())


def _are_settings(settings: Any) -> bool:
    if type(settings) is not dict:
        return False
    return all(isinstance(name, str) and type(value) in (int, float, str) for name, value in settings.items())
