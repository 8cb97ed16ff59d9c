"""Operations on the FP8 scales of a whole state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from scoped_fn.state.compiler_state import CompilerState
from scoped_fn.state.fp8_state import Fp8State
from scoped_fn.state.frozen_dict import FrozenDict
from scoped_fn.state.input_queue import InputQueue, queue_from, queue_static, queue_tensors
from scoped_fn.state.owners import check_owner, token_of


def merge(state: CompilerState) -> CompilerState:
    """Returns the state that a function mapped by `torch.vmap` gave, one for each index, as one state.

    Staged amaxes combine by maximum. Everything else has to be what all indices share: under vmap amaxes are staged,
    and scales updated after it.

    Args:
        state: A state whose tensors all have one dimension more for each vmap, in front, or none.

    Raises:
        ValueError: The buffers differ from index to index.

    Example:
        >>> from scoped_fn.state import init_state
        >>> merge(init_state())
        CompilerState(key=(0, 0), next_token=0)
    """
    depth = state.key.dim() - 1
    if not depth:
        return state
    fp8 = {owner: _merged(held, depth) for owner, held in state.fp8.items()}
    buffers = {
        owner: FrozenDict({name: _first(value, depth, name) for name, value in named.items()})
        for owner, named in state.buffers.items()
    }
    inputs = {owner: _shared_queue(queue, depth) for owner, queue in state.inputs.items()}
    key = _first(state.key, depth, "key")
    return replace(state, fp8=FrozenDict(fp8), buffers=FrozenDict(buffers), inputs=FrozenDict(inputs), key=key)


def _shared_queue(queue: InputQueue, depth: int) -> InputQueue:
    tensors = {
        name: [[_first(value, depth, name) for value in values] for values in parts]
        for name, parts in queue_tensors(queue).items()
    }
    return queue_from(queue_static(queue), tensors)


def _merged(held: Fp8State, depth: int) -> Fp8State:
    history = held.amax_history.amax(tuple(range(depth)))
    scale, sink = (_first(value, depth, "scale") for value in (held.scale, held.grad_sink))
    return replace(held, scale=scale, amax_history=history, grad_sink=sink)


def _first(value: torch.Tensor, depth: int, name: str) -> torch.Tensor:
    """Returns what all indices share."""
    first = value[(0,) * depth]
    if not torch.equal(first.expand_as(value), value):
        raise ValueError(
            f"Expected {name!r} to be the same for all indices of vmap, got one that differs. Only amaxes are merged."
        )
    return first


def the_owner(state: CompilerState, owner: Any) -> int:
    """Returns the token of the owner that is meant; None means the only one with FP8 state.

    Raises:
        OwnershipError: The state does not hold it.
        ValueError: There are several, or none.
    """
    if owner is not None:
        token = check_owner(state, token_of(owner))
        if token not in state.fp8:
            raise ValueError(f"Expected an owner with FP8 scales, got {state.owners[token].name}, which has none.")
        return token
    if (
        len({id(held.amax_history) for held in state.fp8.values()}) != 1
    ):  # owners may share one, as the modes of an engine do
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
    if not isinstance(state, CompilerState):
        raise TypeError(f"Expected a CompilerState, got a {type(state).__name__}. Write describe_fp8(state, fn).")
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
