"""What a `state_dict` of an `Engine` holds: the model's own names, then the FP8 scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from scoped_fn._errors import SpecError
from scoped_fn.state import Fp8State

if TYPE_CHECKING:
    from scoped_fn._engine import Engine

FP8_KEYS = ("fp8.scale", "fp8.amax_history", "fp8.columns")


def rename_saved(engine: nn.Module, entries: Any, prefix: str, metadata: Any) -> None:
    """Gives what a state_dict holds of an engine the model's own names, and adds the FP8 scales."""
    own = prefix + "model."
    values = [(key.removeprefix(own), entries.pop(key)) for key in list(entries) if key.startswith(own)]
    entries.update({prefix + key: value for key, value in values})
    for name, tensor in cast("Engine", engine).get_fp8_tensors().items():
        entries[prefix + name] = tensor


def rename_loaded(
    engine: nn.Module, entries: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *_: Any
) -> None:
    """Takes the FP8 scales out of a state_dict and gives the rest the names that modules look for."""
    ours = cast("Engine", engine)
    found = {key: entries.pop(prefix + key) for key in FP8_KEYS if prefix + key in entries}
    if found:
        ours.set_fp8_tensors(found)
    elif ours.get_fp8_tensors():
        missing += [prefix + key for key in FP8_KEYS]
    keys = [key for key in ours.model.state_dict(keep_vars=True) if prefix + key in entries]
    entries.update({f"{prefix}model.{key}": value for key, value in [(k, entries.pop(prefix + k)) for k in keys]})


def check_loaded(held: Fp8State, saved: list[Any], tensors: Mapping[str, Any]) -> None:
    """Raises `SpecError` if saved scales are of another model or recipe."""
    shape = (held.recipe.amax_history_len, len(saved))
    if sorted(saved) != sorted(held.columns):
        different = sorted(set(saved) ^ set(held.columns))
        raise SpecError(
            f"Expected FP8 scales of the sites of this engine, got others: {different[0]} is on one side only. "
            "Make the engine with the same model, skip and recipe."
        )
    history, scale = tensors["fp8.amax_history"], tensors["fp8.scale"]
    if tuple(history.shape) != shape or tuple(scale.shape) != shape[1:]:
        raise SpecError(
            f"Expected an amax history of shape {shape}, got {tuple(history.shape)}. "
            f"Make the engine with amax_history_len={len(history)}."
        )
