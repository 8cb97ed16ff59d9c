"""Config overrides: who holds which value of a setting of torch, as data; see `effects` for when they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scoped_fn.state.compiler_state import CompilerState
from scoped_fn.state.frozen_dict import FrozenDict
from scoped_fn.state.owners import OwnershipError, check_owner, token_of


def with_override(state: CompilerState, owner: Any, key: str, value: Any) -> CompilerState:
    """Returns the state in which an owner holds a value for a setting; the setting's name is not checked here."""
    token = check_owner(state, token_of(owner))
    holders: FrozenDict[int, Any] = state.overrides.get(key, FrozenDict())
    if token in holders and type(holders[token]) is type(value) and holders[token] == value:
        return state
    return replace(state, overrides=state.overrides.set(key, holders.set(token, value)))


def drop_override(state: CompilerState, owner: Any, key: str) -> CompilerState:
    """Returns the state in which an owner no longer holds a value for a setting.

    Args:
        state: A state that holds the owner.
        owner: A token, or anything with an `owner` attribute.
        key: The setting, as it was given to `set_override`.

    Raises:
        OwnershipError: The state does not hold the owner, or the owner holds no value for the setting.
    """
    token = check_owner(state, token_of(owner))
    if token not in state.overrides.get(key, ()):
        held = ", ".join(overrides_of(state, token)) or "none"
        raise OwnershipError(
            f"Expected owner {token} ({state.owners[token].name}) to hold an override of {key!r}, got {held}. "
            "Drop only what was set."
        )
    rest = state.overrides[key].drop(token)
    return replace(state, overrides=state.overrides.set(key, rest) if rest else state.overrides.drop(key))


def overrides_of(state: CompilerState, owner: Any) -> FrozenDict[str, Any]:
    """Returns the settings that an owner holds values for, and these values.

    Raises:
        OwnershipError: The state does not hold the owner.
    """
    token = check_owner(state, token_of(owner))
    if not state.overrides:
        return FrozenDict()
    return FrozenDict({key: holders[token] for key, holders in state.overrides.items() if token in holders})
