"""The update of scales at the end of a step: what was staged rolls into the history, and new scales follow from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from scoped_fn import kernels
from scoped_fn._state_check import check_state
from scoped_fn.state import CompilerState, Fp8State
from scoped_fn.state.fp8 import the_owner


def update_scales(state: CompilerState, owner: Any = None) -> CompilerState:
    """Returns the state with amax histories rolled and new scales: the end of a step.

    `value_and_grad` does it unless `accumulate=True`. A column that staged nothing, zero or a number that is not finite
    keeps its history and scale. Each owner's scales follow the recipe that it was last called under.

    Args:
        state: Any state.
        owner: A token or compiled function; None for all.

    Raises:
        OwnershipError: The state does not hold the owner.
        ValueError: The owner has no FP8 scales.

    Example:
        >>> import scoped_fn as sf
        >>> sf.update_scales(sf.init_state())
        CompilerState(key=(0, 0), next_token=0)
    """
    check_state(state)
    owners = list(state.fp8) if owner is None else [the_owner(state, owner)]
    if not owners:
        return state
    fp8 = state.fp8
    before: list[Fp8State] = []
    after: list[Fp8State] = []
    with torch.no_grad():
        for token in owners:
            held = state.fp8[token]
            at = next((i for i, other in enumerate(before) if other is held), None)
            if at is None:
                before, after, at = [*before, held], [*after, updated(held)], len(before)
            fp8 = fp8.set(token, after[at])  # owners that share one go on doing so
    return replace(state, fp8=fp8)


def updated(held: Fp8State) -> Fp8State:
    """Returns one owner's scales after a step; those of an ensemble have a dimension of members in front."""
    if held.scale.dim() > 1:
        history, scale = torch.vmap(lambda history, scale: _updated(held, history, scale))(
            held.amax_history, held.scale
        )
    else:
        history, scale = _updated(held, held.amax_history, held.scale)
    return replace(held, amax_history=history, scale=scale)


def _updated(held: Fp8State, history: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    recipe = held.recipe
    limits = torch.tensor([recipe.fp8_max(role) for _, role in held.columns], device=history.device)
    if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
        return _by_functions(recipe, history, scale, limits)
    algorithm = recipe.amax_compute_algo
    return kernels.update_scales(history, scale, fp8_max=limits, algorithm=algorithm, margin=recipe.margin)


def _by_functions(
    recipe: Any, history: torch.Tensor, old: torch.Tensor, limits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The update by functions of the user; columns that staged nothing stay as they are."""
    last = history[0]
    ran = (last > 0) & last.isfinite()
    if callable(recipe.amax_compute_algo):
        amax = recipe.amax_compute_algo(history)
    else:
        amax = history.amax(0) if recipe.amax_compute_algo == "max" else last
    usable = ran & (amax > 0) & amax.isfinite()
    if recipe.scaling_factor_compute_algo is not None:
        scale = recipe.scaling_factor_compute_algo(amax, old, limits, recipe)
    else:
        scale = (limits * 2.0**-recipe.margin / torch.where(usable, amax, 1.0)).clamp_max(
            torch.finfo(torch.float32).max
        )
    zeros = torch.zeros_like(last)[None]
    rolled = torch.cat([zeros, history[2:], last[None]])[: len(history)]
    kept = torch.cat([zeros, history[1:]])
    return torch.where(ran, rolled, kept), torch.where(usable, scale, old)
