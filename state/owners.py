"""Owners: one token for each compiled function, and the data that goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from scoped_fn.state.compiler_state import CompilerState, Owner
from scoped_fn.state.frozen_dict import FrozenDict


class OwnershipError(RuntimeError):
    """A token or function was used with a state that does not hold it."""


def acquire(state: CompilerState, name: str) -> tuple[CompilerState, int]:
    """Returns the state with one more owner, and its token.

    Tokens come from a counter in the state: the same program gives the same tokens, and none repeats in one history.

    Example:
        >>> from scoped_fn.state import init_state
        >>> state, owner = acquire(init_state(), "encoder")
        >>> owner, state.owners[owner].name
        (0, 'encoder')
    """
    if not isinstance(name, str):
        raise TypeError(f"Expected the name of an owner as a string, got {name!r}. Pass a string.")
    token = state.next_token
    return replace(state, owners=state.owners.set(token, Owner(name)), next_token=token + 1), token


def release(state: CompilerState, owner: Any) -> CompilerState:
    """Returns the state without an owner and everything kept for it: buffers, FP8 scales, overrides, frames, inputs.

    Nothing else changes. Code stays with its function, and a backward that waits keeps what it needs.

    Args:
        state: A state that holds the owner.
        owner: A token, or anything with an `owner` attribute, such as a compiled function.

    Raises:
        OwnershipError: The state does not hold it, for instance because it was released before.
    """
    token = check_owner(state, token_of(owner))
    overrides = {key: _without(holders, token) for key, holders in state.overrides.items()}
    return replace(
        state,
        owners=state.owners.drop(token),
        buffers=_without(state.buffers, token),
        fp8=_without(state.fp8, token),
        inputs=_without(state.inputs, token),
        overrides=FrozenDict({key: holders for key, holders in overrides.items() if holders}),
    )


def renewed(state: CompilerState, token: int, **changes: Any) -> CompilerState:
    """Returns the state with some fields of an `Owner` changed."""
    return replace(state, owners=state.owners.set(token, replace(state.owners[token], **changes)))


def _without(parts: FrozenDict[int, Any], token: int) -> FrozenDict[int, Any]:
    return parts.drop(token) if token in parts else parts


def settle(state: CompilerState, token: int) -> CompilerState:
    """Returns the state in which an owner has a function.

    Raises:
        OwnershipError: It has one already, whose buffers and scales a second one would share.
    """
    held = state.owners[token]
    if held.settled:
        raise OwnershipError(
            f"Expected an owner that no function was compiled for, got {token} ({held.name}), which has one. "
            "Use recompile, or acquire another owner."
        )
    return renewed(state, token, settled=True)


def set_buffers(state: CompilerState, owner: Any, buffers: Mapping[str, torch.Tensor]) -> CompilerState:
    """Returns the state with the owner's buffers replaced as a whole.

    Args:
        state: A state that holds the owner.
        owner: A token, or a compiled function.
        buffers: Name -> tensor. The tensors are kept as they are, not copied.

    Raises:
        OwnershipError: The state does not hold the owner.
    """
    token = check_owner(state, token_of(owner))
    return replace(state, buffers=state.buffers.set(token, FrozenDict(buffers)))


def token_of(owner: Any) -> Any:
    """Returns the token that is meant: of a compiled function its owner, else what was given."""
    return getattr(owner, "owner", owner)


def check_owner(state: CompilerState, token: Any, name: str | None = None) -> int:
    """Returns `token` if the state holds it, under that name if one is given.

    Raises:
        OwnershipError: It does not; the text says what happened to it.
    """
    held = state.owners.get(token) if isinstance(token, int) else None
    if held is not None and name in (None, held.name):
        return int(token)
    known = isinstance(token, (int, str))
    what = (f"owner {token!r}" if known else f"owner of type {type(token).__name__}") + (f" ({name})" if name else "")
    if held is not None:
        fate, advice = f"a state in which {token} is {held.name}", "Pass one state through every call, not two apart."
    elif isinstance(token, int) and 0 <= token < state.next_token:
        fate, advice = "a state in which it was released", "Compile again to use it; there is nothing left to release."
    else:
        fate = "a state that never handed it out"
        advice = "Use the state returned by compile or by the last call, and a token or a compiled function of it."
    others = ", ".join(f"{key} ({owner.name})" for key, owner in state.owners.items()) or "none"
    raise OwnershipError(f"Expected a state that holds {what}, got {fate}; its owners: {others}. {advice}")
