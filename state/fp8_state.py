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

    def to(self, device: torch.device) -> Fp8State:
        """Returns the same on a device."""
        return replace(
            self,
            scale=self.scale.to(device),
            amax_history=self.amax_history.to(device),
            grad_sink=self.grad_sink.to(device),
        )


def gradients_of(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Returns the columns of gradients, in the order of their sinks."""
    return tuple(column for column in columns if column[1] == GRADIENT)


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
        made = (scale != 1) | (old.amax_history[1:] > 0).any(0)
        scale = torch.where(made, scale * factor, scale)
    history = _resized(old.amax_history, recipe.amax_history_len)
    return replace(old, recipe=recipe, scale=scale, amax_history=history)


def _resized(history: torch.Tensor, length: int) -> torch.Tensor:
    """Returns a history of another length, without its oldest entries, or with zeros before them."""
    if len(history) == length:
        return history
    kept = history[max(1, len(history) - length + 1) :]
    zeros = history.new_zeros(length - 1 - len(kept), history.shape[1])
    return torch.cat([history[:1], zeros, kept])


def needed_fp8(
    old: Fp8State | None, columns: Sequence[Column], recipe: Any, device: torch.device | None = None
) -> Fp8State:
    """Returns the state under a recipe, with every one of the columns."""
    if old is None:
        return init_fp8(columns, recipe, device)
    return extend_fp8(follow_recipe(old, recipe), columns)


def selected(held: Fp8State, columns: Sequence[Column]) -> list[torch.Tensor]:
    """Returns the scales of these columns, and the sinks of those among them that are of gradients."""
    if held.columns == columns:
        return [held.scale, held.grad_sink]
    scale = _arranged(held.scale, held.columns, columns, held.scale)
    return [scale, _arranged(held.grad_sink, gradients_of(held.columns), gradients_of(columns), held.grad_sink)]


def _arranged(
    values: torch.Tensor, source: Sequence[Column], target: Sequence[Column], rest: torch.Tensor
) -> torch.Tensor:
    """Returns values of the source columns in the order of the target's; those of `rest` where there is none."""
    if tuple(source) == tuple(target):
        return values
    places = {column: i for i, column in enumerate(source)}
    index = [places.get(column, len(source) + i) for i, column in enumerate(target)]
    # Gathered, not written to: this has to work under every transform and tracer.
    return torch.cat([values, rest])[torch.tensor(index, dtype=torch.int64, device=values.device)]


def with_sinks(held: Fp8State, sinks: torch.Tensor, columns: Sequence[Column]) -> Fp8State:
    """Returns the state with the sinks of these columns, as they came out of a call, in place of its own."""
    own = gradients_of(held.columns)
    return replace(held, grad_sink=_arranged(sinks, gradients_of(columns), own, held.grad_sink))


def stage_amax(held: Fp8State, amax: torch.Tensor, columns: Sequence[Column] | None = None) -> Fp8State:
    """Returns the state with amaxes combined by maximum into the staging row.

    Args:
        held: The state.
        amax: float32, one for each of the columns.
        columns: Columns of the state; None for all.
    """
    if columns is not None:
        amax = _arranged(amax, columns, held.columns, amax.new_zeros(len(held.columns)))
    row = torch.maximum(held.amax_history[0], amax)
    return replace(held, amax_history=torch.cat([row[None], held.amax_history[1:]]))


def stage_gradients(held: Fp8State, amax: torch.Tensor, columns: Sequence[Column] | None = None) -> Fp8State:
    """Returns the state with the amaxes of gradients in the staging row.

    Args:
        held: The state.
        amax: float32, one for each column of a gradient. Columns are only ever added at the end, so those of an earlier
            state are the first ones.
        columns: Columns of the state; None for all.
    """
    count = len(held.columns)
    own = gradients_of(held.columns if columns is None else columns)[: len(amax)]
    if not own:
        return held
    if count == 3 * len(own) and held.columns[2::3] == own:  # as most often: no index to be built
        return stage_amax(held, torch.nn.functional.pad(amax[:, None], (2, 0)).reshape(count))
    return stage_amax(held, amax, own)


def tensors_of(held: Fp8State) -> dict[str, torch.Tensor]:
    """Returns the tensors by name."""
    return {"amax_history": held.amax_history, "grad_sink": held.grad_sink, "scale": held.scale}


def from_tensors(static: tuple[tuple[Column, ...], Any], tensors: Mapping[str, Any]) -> Fp8State:
    """Returns the state with these columns and recipe, and these tensors by name."""
    return Fp8State(*static, tensors["scale"], tensors["amax_history"], tensors["grad_sink"])
