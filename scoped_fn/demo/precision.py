"""The recipes of ``scoped-fn train`` by name, and what a run's scales look like."""

from __future__ import annotations

from dataclasses import dataclass

import scoped_fn as sf
from scoped_fn.state import Fp8State

UNQUANTIZED = "none"
RECIPES = (UNQUANTIZED, "delayed", "current", "block", "mxfp8")
# The model's amaxes move by a few percent in a step. Fifteen steps of memory cover a peak without holding on to the
# amaxes of a warm-up that is long over.
AMAX_HISTORY_LEN = 16
ROLES = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class RoleScales:
    """The scales of one role, over all sites of a run.

    Attributes:
        role: "input", "weight" or "grad_output".
        sites: Number of sites.
        amax: Least and greatest of the newest amaxes.
        scale: Least and greatest scale.
    """

    role: str
    sites: int
    amax: tuple[float, float]
    scale: tuple[float, float]

    def __str__(self) -> str:
        return f"amax {_span(self.amax)}, scale {_span(self.scale)}"


def recipe_of(name: str) -> sf.recipes.Recipe | None:
    """Returns the recipe of a name in `RECIPES`; None for the unquantized model."""
    recipes: dict[str, sf.recipes.Recipe | None] = {
        UNQUANTIZED: None,
        "delayed": sf.DelayedScaling(amax_history_len=AMAX_HISTORY_LEN),
        "current": sf.Float8CurrentScaling(),
        "block": sf.Float8BlockScaling(),
        "mxfp8": sf.MXFP8BlockScaling(),
    }
    return recipes[name]


def first_state(seed: int, recipe: str) -> sf.CompilerState:
    """Returns an empty state inside the scope of a recipe, which stays open for the whole run."""
    state = sf.init_state(key=seed)
    chosen = recipe_of(recipe)
    return state if chosen is None else sf.autocast(state, chosen)


def scales_of(state: sf.CompilerState) -> Fp8State | None:
    """Returns the scales and amaxes of the run's one function; None where its recipe remembers none."""
    return next(iter(state.fp8.values()), None)


def summarize_scales(state: sf.CompilerState) -> tuple[RoleScales, ...]:
    """Returns amaxes and scales by role; empty where the recipe remembers none."""
    sites = sf.describe_fp8(state).values()
    summaries = []
    for role in ROLES:
        found = [roles[role] for roles in sites if role in roles]
        if found:
            amaxes, scales = [each["history"][0] for each in found], [each["scale"] for each in found]
            summaries.append(RoleScales(role, len(found), _range(amaxes), _range(scales)))
    return tuple(summaries)


def _range(numbers: list[float]) -> tuple[float, float]:
    return min(numbers), max(numbers)


def _span(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.3g} to {ends[1]:.3g}"
