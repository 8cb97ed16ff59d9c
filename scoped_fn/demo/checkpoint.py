"""Training runs on disk: one file that `torch.load` reads with ``weights_only=True``."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import scoped_fn as sf
from scoped_fn.demo.adamw import Moments
from scoped_fn.demo.errors import UsageError
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.precision import UNQUANTIZED, scales_of
from scoped_fn.demo.train import Carry

FORMAT = "scoped-fn train 1"
PARTS = frozenset({"settings", "params", "count", "mean", "square", "losses"})

Settings = dict[str, int | str]


def save_checkpoint(carry: Carry, options: TrainOptions) -> None:
    """Writes parameters, optimizer state, scales, losses and settings to ``--checkpoint``, where one is given.

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
        "fp8": _fp8_content(carry.state),
    }
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(content, unfinished)
    os.replace(unfinished, path)


def load_checkpoint(options: TrainOptions) -> dict[str, Any] | None:
    """Returns the content of ``--checkpoint``, or None where there is no such file yet.

    Raises:
        UsageError: The file is no such checkpoint, or was made with another seed, batch, recipe or model.
    """
    path = options.checkpoint
    if path is None or not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises about anything on a file that is not its own
        raise UsageError(_not_a_checkpoint(path)) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not content.keys() >= PARTS:
        raise UsageError(_not_a_checkpoint(path))
    saved, ours = {"recipe": UNQUANTIZED, **content["settings"]}, _settings(options)  # files older than recipes
    differing = [name for name in ours if saved[name] != ours[name]]
    if differing:
        expected = " ".join(f"--{name} {saved[name]}" for name in differing)
        got = " ".join(f"--{name} {ours[name]}" for name in differing)
        raise UsageError(f"Expected {expected} as in '{path}', got {got}. Give the same or another --checkpoint.")
    return content


def resume(carry: Carry, content: dict[str, Any]) -> Carry:
    """Returns the run that a checkpoint's content holds, on the compiler state of `carry`.

    Raises:
        UsageError: The scales are those of other sites than this model has.
    """
    moments = Moments(content["count"], content["mean"], content["square"])
    state = _with_scales(carry.state, content.get("fp8"))
    return replace(carry, state=state, params=content["params"], moments=moments, losses=tuple(content["losses"]))


def _fp8_content(state: sf.CompilerState) -> dict[str, Any] | None:
    held = scales_of(state)
    if held is None:
        return None
    columns = [list(column) for column in held.columns]
    return {"columns": columns, "scale": held.scale, "amax_history": held.amax_history}


def _with_scales(state: sf.CompilerState, saved: dict[str, Any] | None) -> sf.CompilerState:
    """Returns the state with saved scales and amaxes; the sinks are zeros between steps."""
    held = scales_of(state)
    if held is None:
        return state
    columns = () if saved is None else tuple(tuple(column) for column in saved["columns"])
    if saved is None or columns != held.columns or saved["amax_history"].shape != held.amax_history.shape:
        raise UsageError(
            f"Expected scales of the {len(held.columns)} columns of this model in --checkpoint, got those of "
            f"{len(columns)} others. Give another --checkpoint."
        )
    held = replace(held, scale=saved["scale"], amax_history=saved["amax_history"])
    return replace(state, fp8=state.fp8.set(next(iter(state.fp8)), held))


def _settings(options: TrainOptions) -> Settings:
    model = asdict(options.model)
    del model["vocabulary"]
    return {"seed": options.seed, "batch": options.batch, "recipe": options.recipe, **model}


def _not_a_checkpoint(path: Path) -> str:
    return f"Expected a checkpoint of scoped-fn train, got '{path}'. Give another --checkpoint."
