"""The FP8 part of a TransformerEngine checkpoint, into a state and out of it.

TransformerEngine has, for each matmul of a module, three columns of the forward (input, weight, output) and two of the
backward (grad_output, grad_input). A state has one for each of input, weight and grad_output; the other two stay as
they begin where nothing is quantized for them: scale 1, no amax. Rows are in the same order on both sides: row 0 is
staging, rows 1 to L - 1 are the past, oldest first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from scoped_fn.interop.te_extra_state import extra_state_tensors, refusal
from scoped_fn.state import CompilerState, Fp8State, FrozenDict
from scoped_fn.state.fp8 import the_owner

SUFFIX = "._extra_state"
# Role -> direction, columns of a matmul in that direction, and which of them it is.
PLACES: Mapping[str, tuple[str, int, int]] = MappingProxyType(
    {"input": ("fwd", 3, 0), "weight": ("fwd", 3, 1), "grad_output": ("bwd", 2, 0)}
)

Names = Mapping[str, str | tuple[str, int]]
ExtraStates = dict[str, dict[str, torch.Tensor]]


def fp8_from_transformer_engine(
    state: CompilerState, fn_or_owner: Any, state_dict: Mapping[str, Any], *, names: Names | None = None
) -> CompilerState:
    """Returns the state with the scales and amax histories of a TransformerEngine checkpoint.

    Nothing in the checkpoint is executed, and TransformerEngine need not be installed.

    Args:
        state: A state in which a function was compiled under delayed scaling.
        fn_or_owner: The function, or its token.
        state_dict: Holds, under `MODULE._extra_state`, what TransformerEngine saves of each module: a pickle in a
            uint8 tensor or a `BytesIO`; or the tensors `scale_fwd`, `amax_history_fwd`, `scale_bwd` and
            `amax_history_bwd` in a dict. Anything else in it is left alone.
        names: Site -> module of TransformerEngine, or (module, index) for one of several matmuls of a module. Sites
            that are not in it are modules of the same name.

    Returns:
        The state whose columns have these scales and histories. A longer history keeps its newest rows, a shorter one
        gets zeros for what it does not know.

    Raises:
        CheckpointError: A site is not in the checkpoint, or what is there has another form.
        ValueError: The owner has no FP8 scales, or `names` has a site or an index that is none.
        OwnershipError: The state does not hold the owner.

    Example:
        >>> import scoped_fn as sf
        >>> state = sf.autocast(sf.init_state(), sf.DelayedScaling(amax_history_len=2))
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16))
        >>> state, fn = sf.compile(state, model, (torch.ones(16, 16),), backend="eager")
        >>> saved = fp8_to_transformer_engine(state, fn, names={"0": "layer"})
        >>> saved["layer._extra_state"]["scale_fwd"][0] = 4.0
        >>> state = fp8_from_transformer_engine(state, fn, saved, names={"0": "layer"})
        >>> sf.describe_fp8(state)["0"]["input"]["scale"]
        4.0
    """
    held = _held(state, fn_or_owner, names)
    modules = {module: _read(state_dict, module) for module in {_place(site, names)[0] for site, _ in held.columns}}
    scale, history = held.scale.clone(), held.amax_history.clone()
    for column, (site, role) in enumerate(held.columns):
        module, matmul = _place(site, names)
        direction, width, which = PLACES[role]
        tensors, theirs = modules[module], width * matmul + which
        if theirs >= len(tensors[f"scale_{direction}"]):
            advice = "Say which matmul is meant: names={site: (module, index)}."
            raise refusal(f"matmul {matmul} of {module!r}", f"{len(tensors['scale_bwd']) // 2} matmuls", advice)
        scale[column] = tensors[f"scale_{direction}"][theirs]
        history[:, column] = _of_length(tensors[f"amax_history_{direction}"][:, theirs], len(history))
    if not bool(((scale > 0) & scale.isfinite()).all()) or not bool((history >= 0).all()):
        raise refusal("scales above 0 and amaxes of 0 or more", "others", "The extra state is damaged: use another.")
    new = replace(held, scale=scale, amax_history=history)
    shared = {token: new if each is held else each for token, each in state.fp8.items()}
    return replace(state, fp8=FrozenDict(shared))


def fp8_to_transformer_engine(state: CompilerState, fn_or_owner: Any, *, names: Names | None = None) -> ExtraStates:
    """Returns the scales and amax histories of an owner by TransformerEngine's names and in its columns.

    TransformerEngine itself takes an extra state as a pickle, with its recipe in it: docs/checkpoints.md has the line
    that makes one of what is returned here.

    Args:
        state: A state in which a function was compiled under delayed scaling.
        fn_or_owner: The function, or its token.
        names: As in `fp8_from_transformer_engine`.

    Returns:
        `MODULE._extra_state` -> `scale_fwd` (3 g), `amax_history_fwd` (L, 3 g), `scale_bwd` (2 g) and
        `amax_history_bwd` (L, 2 g), float32, for g matmuls of the module.

    Raises:
        ValueError: The owner has no FP8 scales, or two sites go to one place.
        OwnershipError: The state does not hold the owner.
    """
    held = _held(state, fn_or_owner, names)
    places = {site: _place(site, names) for site, _ in held.columns}
    if len(set(places.values())) != len(places):
        raise ValueError(f"Expected a place of its own for each site, got {places}. Check names.")
    made = {module: _blank(held, module, places) for module, _ in places.values()}
    for column, (site, role) in enumerate(held.columns):
        module, matmul = places[site]
        direction, width, which = PLACES[role]
        theirs = width * matmul + which
        made[module][f"scale_{direction}"][theirs] = held.scale[column]
        made[module][f"amax_history_{direction}"][:, theirs] = held.amax_history[:, column]
    return {module + SUFFIX: tensors for module, tensors in made.items()}


def _held(state: CompilerState, fn_or_owner: Any, names: Names | None) -> Fp8State:
    held = state.fp8[the_owner(state, fn_or_owner)]
    sites = list(dict.fromkeys(site for site, _ in held.columns))
    unknown = [site for site in names or {} if site not in sites]
    if unknown:
        raise ValueError(f"Expected names of the sites {', '.join(sites)}, got one of {unknown[0]!r}. Check names.")
    return held


def _place(site: str, names: Names | None) -> tuple[str, int]:
    named = (names or {}).get(site, site)
    module, matmul = (named, 0) if isinstance(named, str) else named
    if type(matmul) is not int or matmul < 0:
        raise ValueError(f"Expected the index of a matmul of {module!r}, from 0, got {matmul!r}. Check names.")
    return module, matmul


def _read(state_dict: Mapping[str, Any], module: str) -> dict[str, torch.Tensor]:
    name = module + SUFFIX
    if name not in state_dict:
        known = [key.removesuffix(SUFFIX) for key in state_dict if str(key).endswith(SUFFIX)]
        advice = "Say what your modules are called there: names={site: module}."
        raise refusal(f"{name!r} in the state_dict", f"{', '.join(known[:5]) or 'no extra state at all'}", advice)
    return extra_state_tensors(state_dict[name], name)


def _blank(held: Fp8State, module: str, places: Mapping[str, tuple[str, int]]) -> dict[str, torch.Tensor]:
    matmuls = 1 + max(matmul for other, matmul in places.values() if other == module)
    length = len(held.amax_history)
    return {
        "scale_fwd": held.scale.new_ones(3 * matmuls),
        "amax_history_fwd": held.scale.new_zeros(length, 3 * matmuls),
        "scale_bwd": held.scale.new_ones(2 * matmuls),
        "amax_history_bwd": held.scale.new_zeros(length, 2 * matmuls),
    }


def _of_length(history: torch.Tensor, length: int) -> torch.Tensor:
    """Returns one column of a history with another number of rows: the staged amax, and the newest of the past."""
    past = history[1:][-(length - 1) :] if length > 1 else history[:0]
    return torch.cat([history[:1], history.new_zeros(length - 1 - len(past)), past])
