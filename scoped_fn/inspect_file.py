"""What a file holds, read as data: files of `scoped_fn.save`, and saved `Engine`s."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scoped_fn._checkpoint.load import read
from scoped_fn._checkpoint.plain import joined
from scoped_fn._checkpoint.read import is_saved
from scoped_fn._errors import CheckpointError
from scoped_fn.demo.errors import UsageError
from scoped_fn.demo.saved_run import SavedRun, are_tensors, run_of
from scoped_fn.state import CompilerState, Fp8State

SCALE, HISTORY, COLUMNS = "fp8.scale", "fp8.amax_history", "fp8.columns"


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
class SavedValue:
    """A file of `scoped_fn.save`.

    Attributes:
        schema: Version of the schema that it was written in.
        tensors: All tensors by name, in the forms in which they are stored.
        states: The states in it by their paths; "" for a state that is all there is.
        plain: What is neither a tensor nor in a state, by its path.
        run: The run, of a checkpoint of ``scoped-fn train``.
    """

    schema: int
    tensors: Mapping[str, Tensor]
    states: Mapping[str, CompilerState]
    plain: Mapping[str, Any]
    run: SavedRun | None


@dataclass(frozen=True)
class SavedEngine:
    """The `state_dict` of an `Engine`: the model's entries by name, and a row for each site and role."""

    params: dict[str, Tensor]
    scales: tuple[ScaleRow, ...]


def read_saved(path: Path) -> SavedValue | SavedEngine:
    """Returns what a file holds. Nothing in it is executed.

    Raises:
        UsageError: It cannot be read, or is neither kind.
    """
    try:
        if path.is_file() and is_saved(path):
            return _value_of(path)
        path.open("rb").close()
    except OSError as error:
        raise _refusal(path, error.strerror or "it cannot be opened") from None
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    return _read_engine(path)


def scale_rows(held: Fp8State) -> tuple[ScaleRow, ...]:
    """Returns a row for each site and role."""
    return _rows(held.columns, held.scale, held.amax_history) or ()


def _value_of(path: Path) -> SavedValue:
    contents = read(path, device=torch.device("cpu"))
    leaves = list(_leaves(contents.value, ""))
    states = {where: leaf for where, leaf in leaves if isinstance(leaf, CompilerState)}
    plain = {where: leaf for where, leaf in leaves if not isinstance(leaf, CompilerState | Tensor)}
    return SavedValue(contents.schema, contents.tensors, states, plain, run_of(contents.value))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _leaves(part, joined(path, key))
    elif isinstance(value, list | tuple) and value:
        for index, part in enumerate(value):
            yield from _leaves(part, joined(path, index))
    else:
        yield path, value


def _read_engine(path: Path) -> SavedEngine:
    try:
        with warnings.catch_warnings():  # about the form of files that are refused anyway
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises about anything on a file that is not its own
        raise _refusal(path, "torch.load cannot read it as plain tensors") from error
    saved = _engine_of(content)
    if saved is None:
        raise _refusal(path, "it holds something else")
    return saved


def _engine_of(content: Any) -> SavedEngine | None:
    if not are_tensors(content) or not content.keys() >= {SCALE, HISTORY, COLUMNS}:
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


def _has_data(value: Any, dtype: torch.dtype, dim: int) -> bool:
    if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
        return False
    return value.dtype == dtype and value.dim() == dim


def _refusal(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"Expected a file of scoped_fn.save or a saved Engine.state_dict() with FP8 scales, got '{path}': "
        f"{reason}. Give another file."
    )
