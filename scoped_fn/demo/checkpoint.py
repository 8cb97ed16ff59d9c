"""Training runs on disk: one file that `torch.load` reads with ``weights_only=True``."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from scoped_fn.demo.adamw import Moments
from scoped_fn.demo.errors import UsageError
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.train import Carry

FORMAT = "scoped-fn train 1"


def save_checkpoint(carry: Carry, options: TrainOptions) -> None:
    """Writes parameters, optimizer state, losses and settings to ``--checkpoint``, where one is given.

    The file changes in one move or not at all.
    """
    path = options.checkpoint
    if path is None:
        return
    content = {
        "format": FORMAT,
        "settings": _settings(options),
        "params": carry.params,
        "count": carry.moments.count,
        "mean": carry.moments.mean,
        "square": carry.moments.square,
        "losses": list(carry.losses),
    }
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(content, unfinished)
    os.replace(unfinished, path)


def load_checkpoint(options: TrainOptions) -> dict[str, Any] | None:
    """Returns the content of ``--checkpoint``, or None where there is no such file yet.

    Raises:
        UsageError: The file is no such checkpoint, or was made with another seed, batch or model.
    """
    path = options.checkpoint
    if path is None or not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises about anything on a file that is not its own
        raise UsageError(_not_a_checkpoint(path)) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(_not_a_checkpoint(path))
    saved, ours = content["settings"], _settings(options)
    differing = [name for name in ours if saved[name] != ours[name]]
    if differing:
        expected = " ".join(f"--{name} {saved[name]}" for name in differing)
        got = " ".join(f"--{name} {ours[name]}" for name in differing)
        raise UsageError(f"Expected {expected} as in '{path}', got {got}. Give the same or another --checkpoint.")
    return content


def resume(carry: Carry, content: dict[str, Any]) -> Carry:
    """Returns the run that a checkpoint's content holds, on the compiler state of `carry`."""
    moments = Moments(content["count"], content["mean"], content["square"])
    return replace(carry, params=content["params"], moments=moments, losses=tuple(content["losses"]))


def _settings(options: TrainOptions) -> dict[str, int]:
    model = asdict(options.model)
    del model["vocabulary"]
    return {"seed": options.seed, "batch": options.batch, **model}


def _not_a_checkpoint(path: Path) -> str:
    return f"Expected a checkpoint of scoped-fn train, got '{path}'. Give another --checkpoint."
