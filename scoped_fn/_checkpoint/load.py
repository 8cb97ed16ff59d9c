"""`load`: a value from a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scoped_fn._checkpoint.atomic import check_path
from scoped_fn._checkpoint.decode import decode, is_shallow
from scoped_fn._checkpoint.header import SCHEMA, parsed_json
from scoped_fn._checkpoint.plain import Document
from scoped_fn._checkpoint.read import read_raw
from scoped_fn._checkpoint.unfit import Unfit, demand
from scoped_fn._checkpoint.upgrade import UPGRADES, upgraded
from scoped_fn._errors import CheckpointError
from scoped_fn._torch.levels import on_values

ADVICE = "Give a file that sf.save made, as it made it."


@dataclass(frozen=True)
class Contents:
    """What a file holds.

    Attributes:
        schema: Version of the schema that it was written in.
        value: What was saved.
        tensors: The tensors in their stored forms, by name, on the CPU.
    """

    schema: int
    value: Any
    tensors: Mapping[str, torch.Tensor]


def load(path: str | os.PathLike[str], *, device: str | torch.device | None = None) -> Any:
    """Returns what `save` wrote: an equal value.

    Nothing in the file is executed. The value is checked as a whole before it is returned, so that a file that was
    damaged, or made to do harm, is an error and no state. What a state's overrides have torch do when it next compiles
    is another matter: look at them before you compile with a state from somebody you do not trust.

    Args:
        path: The file.
        device: Where all tensors go; None for the devices that they were on.

    Raises:
        TypeError: The path is none.
        CheckpointError: It is no file of `save`, was made by a newer version, or is damaged.
        OSError: It cannot be opened or read.

    Example:
        >>> import scoped_fn as sf
        >>> sf.save({"step": 3, "sizes": (1.5, None)}, "plain.safetensors")
        >>> load("plain.safetensors")
        {'step': 3, 'sizes': (1.5, None)}
    """
    return read(path, device=None if device is None else torch.device(device)).value


def read(
    path: str | os.PathLike[str],
    *,
    device: torch.device | None = None,
    newest: int = SCHEMA,
    upgrades: Mapping[int, Callable[[Document], Document]] = UPGRADES,
) -> Contents:
    """Returns what a file holds; `load` says what may be wrong with it."""
    name = check_path(path)  # a number would be taken for an open file
    try:
        with on_values():
            raw = read_raw(name, newest=newest)
            document = parsed_json(raw.text, "a document in JSON")
            demand(is_shallow(document), "JSON that is not deeper than what sf.save makes", "deeper JSON")
            document = upgraded(document, raw.schema, newest=newest, upgrades=upgrades)
            return Contents(raw.schema, decode(document, raw.tensors, device), raw.tensors)
    except Unfit as unfit:
        advice = unfit.advice or ADVICE
        raise CheckpointError(f"Expected {unfit.expected}, got {unfit.got} in '{name!s}'. {advice}") from None
