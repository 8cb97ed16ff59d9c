"""Operations on the FP8 scales of a whole state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scoped_fn.state.compiler_state import CompilerState
from scoped_fn.state.fp8_state import Fp8State
from scoped_fn.state.owners import check_owner


def merge(state: CompilerState) -> CompilerState:
    """Returns the state that a mapped function gave, for each index one, as one state.

    Staged amaxes combine by maximum. Scales and history have to be those of the state that went in, which all indices
    shared: under vmap amaxes are staged, and scales updated after it.

    Args:
        state: A state whose FP8 tensors have a first dimension of the batch, or have none.

    Example:
        >>> from scoped_fn.state import init_state
        >>> merge(init_state())
        CompilerState(key=(0, 0), next_token=0)
    """
    merged = {owner: _merged(held) for owner, held in state.fp8.items()}
    return replace(state, fp8=type(state.fp8)(merged))


def _merged(held: Fp8State) -> Fp8State:
    sink = held.grad_sink[0] if held.grad_sink.dim() == 2 else held.grad_sink
    scale = held.scale[0] if held.scale.dim() == 2 else held.scale
    history = held.amax_history.amax(0) if held.amax_history.dim() == 3 else held.amax_history
    return replace(held, scale=scale, amax_history=history, grad_sink=sink)


def the_owner(state: CompilerState, owner: Any) -> int:
    """Returns the token of the owner that is meant; None means the only one with FP8 state.

    Raises:
        OwnershipError: The state does not hold it.
        ValueError: There are several, or none.
    """
    if owner is not None:
        token = check_owner(state, getattr(owner, "owner", owner))
        if token not in state.fp8:
            raise ValueError(f"Expected an owner with FP8 scales, got {state.owners[token].name}, which has none.")
        return token
    if len({id(held) for held in state.fp8.values()}) != 1:  # owners may share one, as the modes of an engine do
        names = ", ".join(f"{token} ({state.owners[token].name})" for token in state.fp8) or "none"
        raise ValueError(f"Expected one owner with FP8 scales, got {names}. Say which: owner=fn.")
    return next(iter(state.fp8))


def describe_fp8(state: CompilerState, owner: Any = None) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns scales and histories as numbers: `{site: {role: {"history": [newest first], "scale": float}}}`.

    Args:
        state: A state with FP8 scales.
        owner: A token or compiled function; needed only where several have FP8 scales.

    Returns:
        Histories have L entries. In the middle of a step the staged amax comes first; after `update_scales` the last
        entry is 0, since L - 1 steps are kept beside the staging row. Without any FP8 scales, an empty dict.

    Raises:
        ValueError: Several owners have FP8 scales, and none is named.
        OwnershipError: The state does not hold the owner.
    """
    if owner is None and not state.fp8:
        return {}
    held: Fp8State = state.fp8[the_owner(state, owner)]
    described: dict[str, dict[str, dict[str, Any]]] = {}
    rows = held.amax_history.T.tolist()
    for (site, role), column, scale in zip(held.columns, rows, held.scale.tolist(), strict=True):
        staged, past = column[0], column[:0:-1]
        history = [staged, *past] if staged else [*past, staged]
        described.setdefault(site, {})[role] = {"history": history, "scale": scale}
    return described
