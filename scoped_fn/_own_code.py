"""Whether a model's own code draws random numbers in a kind of call that it was not captured for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from scoped_fn._fp8.inline import Inline
from scoped_fn._inline import OBJECT, TENSOR
from scoped_fn._live import copy_with
from scoped_fn._random.rules import DrawsSeen
from scoped_fn._source import Source
from scoped_fn._structure import build_dataclass, flatten
from scoped_fn._torch.levels import on_values
from scoped_fn._torch.tensors import fake_mode


def own_code_draws(source: Source, known: Sequence[Inline], args: Any, kwargs: Any) -> bool:
    """Returns whether the code draws with such arguments, found by running it on tensors without data.

    True if it cannot be run so: nobody knows then.

    Args:
        source: The model.
        known: The captured kinds of calls, none of which draws. They say what tensors there are.
        args: The inputs, with marks in place of tensors and dataclasses.
        kwargs: Those by name.
    """
    for inline in known:
        captured = inline.captured
        held = captured.specs[: len(source.params) + len(source.buffers)]
        inputs = captured.specs[captured.num_held :][: captured.in_structure.num_tensors]
        try:
            with on_values(), fake_mode():
                call = _built((args, dict(sorted(kwargs.items()))), iter([spec.fake() for spec in inputs]))
                tensors, structure = flatten(call, "inputs")
                if len(tensors) != len(inputs):
                    continue
                if structure == captured.in_structure:
                    return False
                with DrawsSeen() as draws:
                    copy_with(source, structure, [*(spec.fake() for spec in held), *tensors])[0]()
            return bool(draws.found)
        except Exception:  # noqa: BLE001 - whatever code says to tensors that it was not made for
            continue
    return True


def _built(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Returns arguments with tensors and dataclasses in place of their marks."""
    if isinstance(value, str) and value == TENSOR:
        return next(tensors)
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str) and value[0] == OBJECT:
        parts = {name: _built(part, tensors) for name, part in value[2].items()}
        return value[1](**parts) if issubclass(value[1], tuple) else build_dataclass(value[1], parts)
    if isinstance(value, (tuple, list)):
        return type(value)(_built(part, tensors) for part in value)
    if isinstance(value, dict):
        return {name: _built(part, tensors) for name, part in value.items()}
    return value
