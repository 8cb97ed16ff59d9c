"""A model's own code in place of its captured graph, and whether it has to be lowered from it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from scoped_fn._ambient import ambient_settings
from scoped_fn._errors import RandomOpError
from scoped_fn._live import Live
from scoped_fn._random.graph import KEY, draws_in_regions
from scoped_fn._replay import uses_forward_mode, uses_transforms
from scoped_fn._trace import NotDerivableError, probe
from scoped_fn.stages.captured import Captured


def needs_code(captured: Captured) -> bool:
    """Returns whether a model has to be lowered from its own code.

    Forward mode is one reason. The other: in a transform inside the model Dynamo takes the forward of a custom Function
    alone where the Function is applied to what is differentiated, and its backward is lost.
    """
    gm = captured.graph.gm
    return uses_forward_mode(gm) or (uses_transforms(gm) and _applies_custom_functions(captured))


def _applies_custom_functions(captured: Captured) -> bool:
    """Runs the model's code without data, and looks whether it applies a custom Function."""
    found: list[Any] = []
    code = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code:
            found.append(frame)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        probe(live_code(captured), [replace(spec, requires_grad=False) for spec in captured.specs], dual=False)
    except NotDerivableError:
        return True
    finally:
        sys.setprofile(before)
    return bool(found)


def refuse_draws_in_regions(captured: Captured) -> None:
    """Raises if a checkpoint region draws: its code would draw again where nobody gives it the same key."""
    if captured.keyed and draws_in_regions(captured.graph.gm):
        raise RandomOpError(
            f"Expected {captured.source.name} to draw outside of checkpoint regions where its own code is run, for "
            "derivatives beyond what its graph says (transforms inside, custom autograd.Functions), got a draw inside. "
            "Draw before the region and pass the numbers in, or do without checkpoint."
        )


def live_code(captured: Captured) -> Live:
    """Returns a model's own code as a function of the placeholders of its graph; every buffer comes back."""
    refuse_draws_in_regions(captured)
    source, ambient = captured.source, ambient_settings("training")
    changed = (*source.buffers, *(name for name in captured.new_buffers if name == KEY))
    return Live(source, captured.in_structure, len(captured.constants), changed, ambient)
