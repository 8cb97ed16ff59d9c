"""Scales and amaxes of one owner: what delayed scaling remembers from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

Column = tuple[str, str]
GRADIENT = "grad_output"


@dataclass(frozen=True, eq=False)
class Fp8State:
    """Scales and amax history of an owner; a column for each site and role.

    Attributes:
        columns: (site, role) of each column; roles are "input", "weight", "grad_output". Static.
        recipe: What the scales are updated by: a recipe of delayed scaling. Static.
        scale: float32 (n,); `x_fp8 = saturate(x * scale)`.
        amax_history: float32 (L, n). Row 0 is staging: the amaxes of the step that has not ended. Rows 1 to L - 1 are
            the past, oldest first.
        grad_sink: float32, zeros, one for each "grad_output" column: the gradient with respect to it is the amax.
    """

    columns: tuple[Column, ...]
    recipe: Any
    scale: torch.Tensor
    amax_history: torch.Tensor
    grad_sink: torch.Tensor

    @property
    def gradients(self) -> tuple[int, ...]:
        """Indices of the columns of gradients, in the order of the sinks."""
        return tuple(i for i, (_, role) in enumerate(self.columns) if role == GRADIENT)


def init_fp8(columns: Sequence[Column], recipe: Any, device: torch.device | None = None) -> Fp8State:
    """Returns scales of 1 and an empty history."""
    count, sinks = len(columns), sum(role == GRADIENT for _, role in columns)
    return Fp8State(
        tuple(columns),
        recipe,
        torch.ones(count, device=device),
        torch.zeros(recipe.amax_history_len, count, device=device),
        torch.zeros(sinks, device=device),
    )


def extend_fp8(old: Fp8State, columns: Sequence[Column]) -> Fp8State:
    """Returns the state with the columns that it lacks."""
    known = set(old.columns)
    missing = [column for column in columns if column not in known]
    if not missing:
        return old
    new = init_fp8(missing, old.recipe, old.scale.device)
    return Fp8State(
        (*old.columns, *missing),
        old.recipe,
        torch.cat([old.scale, new.scale]),
        torch.cat([old.amax_history, _resized(new.amax_history, len(old.amax_history))], 1),
        torch.cat([old.grad_sink, new.grad_sink]),
    )


def follow_recipe(old: Fp8State, recipe: Any) -> Fp8State:
    """Returns the state under another recipe: the newest entries of the history are kept.

    Where the format has another largest number, scales that data had made are made fit for it.
    """
    if old.recipe == recipe:
        return old
    scale = old.scale
    ratio = [recipe.fp8_max(role) / old.recipe.fp8_max(role) for _, role in old.columns]
    if any(r != 1 for r in ratio):
        factor = torch.tensor(ratio, device=scale.device)
        scale = torch.where(old.amax_history.amax(0) > 0, scale * factor, scale)
    history = _resized(old.amax_history, recipe.amax_history_len)
    return replace(old, recipe=recipe, scale=scale, amax_history=history)


def _resized(history: torch.Tensor, length: int) -> torch.Tensor:
    """Returns a history of another length, without its oldest entries, or with zeros before them."""
    if len(history) == length:
        return history
    kept = history[max(1, len(history) - length + 1) :]
    zeros = history.new_zeros(length - 1 - len(kept), history.shape[1])
    return torch.cat([history[:1], zeros, kept])


def stage_amax(old: Fp8State, amax: torch.Tensor) -> Fp8State:
    """Returns the state with the amaxes of all columns (n,) combined by maximum into the staging row."""
    row = torch.maximum(old.amax_history[0], amax)
    return replace(old, amax_history=torch.cat([row[None], old.amax_history[1:]]))


def stage_gradients(old: Fp8State, amax: torch.Tensor) -> Fp8State:
    """Returns the state with the amaxes of the gradients, in the order of the sinks, in the staging row."""
    places, count = {column: i for i, column in enumerate(old.gradients)}, len(old.columns)
    if tuple(places) == tuple(range(2, count, 3)) and count == 3 * len(places):
        return stage_amax(old, torch.nn.functional.pad(amax[:, None], (2, 0)).reshape(count))
    nothing = amax.new_zeros(1)
    pieces = [amax[places[i] : places[i] + 1] if i in places else nothing for i in range(count)]
    return stage_amax(old, torch.cat(pieces)) if places else old


def tensors_of(held: Fp8State) -> dict[str, torch.Tensor]:
    """Returns the tensors by name."""
    return {"amax_history": held.amax_history, "grad_sink": held.grad_sink, "scale": held.scale}


def from_tensors(static: tuple[tuple[Column, ...], Any], tensors: Mapping[str, Any]) -> Fp8State:
    """Returns the state with these columns and recipe, and these tensors by name."""
    return Fp8State(*static, tensors["scale"], tensors["amax_history"], tensors["grad_sink"])
