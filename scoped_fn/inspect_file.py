"""What a file of tensors holds, read as data: checkpoints of ``scoped-fn train`` and saved `Engine`s."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scoped_fn.demo.checkpoint import FORMAT
from scoped_fn.demo.errors import UsageError

SCALE, HISTORY, COLUMNS = "fp8.scale", "fp8.amax_history", "fp8.columns"
RUN_KEYS = frozenset({"settings", "losses", "params", "count"})


@dataclass(frozen=True)
class ScaleRow:
    """The scale of one tensor of one site.

    Attributes:
        site: The site.
        role: "input", "weight" or "grad_output".
        scale: Its scale.
        newest_amax: The newest amax; 0 where there is none.
        window_amax: The greatest amax of the history.
        steps: How many steps are in the history.
    """

    site: str
    role: str
    scale: float
    newest_amax: float
    window_amax: float
    steps: int


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint of ``scoped-fn train``.

    Attributes:
        settings: What the run was started with.
        losses: The loss of each step, in nats a byte.
        count: Number of updates that the optimizer made.
        params: The parameters by name.
        scales: A row for each site and role; empty where the recipe remembers none.
    """

    settings: dict[str, Any]
    losses: tuple[float, ...]
    count: int
    params: dict[str, Tensor]
    scales: tuple[ScaleRow, ...]


@dataclass(frozen=True)
class SavedEngine:
    """The `state_dict` of an `Engine`: the model's entries by name, and a row for each site and role."""

    params: dict[str, Tensor]
    scales: tuple[ScaleRow, ...]


def read_saved(path: Path) -> SavedRun | SavedEngine:
    """Returns what a file holds. Nothing in it is executed.

    Raises:
        UsageError: It cannot be read, or is neither kind.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise _refusal(path, error.strerror or "it cannot be opened") from None
    try:
        with warnings.catch_warnings():  # about the form of files that are refused anyway
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises about anything on a file that is not its own
        raise _refusal(path, "torch.load cannot read it as plain tensors") from error
    saved = _run_of(content) or _engine_of(content)
    if saved is None:
        raise _refusal(path, "it holds something else")
    return saved


def _run_of(content: Any) -> SavedRun | None:
    if not isinstance(content, dict) or content.get("format") != FORMAT or not content.keys() >= RUN_KEYS:
        return None
    settings, losses, params, count = (content[key] for key in ("settings", "losses", "params", "count"))
    if not (isinstance(settings, dict) and isinstance(count, int) and _are_tensors(params)):
        return None
    if not (isinstance(losses, list) and all(isinstance(loss, float) for loss in losses)):
        return None
    held = content.get("fp8")
    if held is None:
        return SavedRun(settings, tuple(losses), count, params, ())
    scales = _rows(held.get("columns"), held.get("scale"), held.get("amax_history")) if isinstance(held, dict) else None
    return None if scales is None else SavedRun(settings, tuple(losses), count, params, scales)


def _engine_of(content: Any) -> SavedEngine | None:
    if not _are_tensors(content) or not content.keys() >= {SCALE, HISTORY, COLUMNS}:
        return None
    scales = _rows(_decoded(content[COLUMNS]), content[SCALE], content[HISTORY])
    params = {name: value for name, value in content.items() if name not in (SCALE, HISTORY, COLUMNS)}
    return None if scales is None else SavedEngine(params, scales)


def _decoded(columns: Tensor) -> Any:
    if not _has_data(columns, torch.uint8, 1):
        return None
    try:
        return json.loads(bytes(columns.tolist()))
    except (ValueError, RecursionError):  # neither text nor JSON, or JSON without an end to its depth
        return None


def _rows(columns: Any, scale: Any, history: Any) -> tuple[ScaleRow, ...] | None:
    """Returns the rows; None unless the three are names (n), scales (n) and amaxes (L, n)."""
    if not (_has_data(scale, torch.float32, 1) and _has_data(history, torch.float32, 2)):
        return None
    if not _are_columns(columns) or history.shape[0] == 0 or not len(columns) == len(scale) == history.shape[1]:
        return None
    # Row 0 is staging: amaxes of a step that has not ended. Between steps the newest is the last row.
    newest = torch.where(history[0] > 0, history[0], history[-1])
    numbers = (scale, newest, history.amax(0), (history > 0).sum(0))
    each = zip(columns, *(number.tolist() for number in numbers), strict=True)
    return tuple(ScaleRow(site, role, *rest) for (site, role), *rest in each)


def _are_columns(columns: Any) -> bool:
    if not isinstance(columns, Sequence) or not all(isinstance(each, list | tuple) for each in columns):
        return False
    return all(len(each) == 2 and all(isinstance(part, str) for part in each) for each in columns)


def _are_tensors(content: Any) -> bool:
    if not isinstance(content, Mapping):
        return False
    return all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items())


def _has_data(value: Any, dtype: torch.dtype, dim: int) -> bool:
    if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
        return False
    return value.dtype == dtype and value.dim() == dim


def _refusal(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"Expected a checkpoint of scoped-fn train or a saved Engine.state_dict() with FP8 scales, got '{path}': "
        f"{reason}. Give another file."
    )
