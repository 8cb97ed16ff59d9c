"""The stack of autocast scopes in a state."""

from __future__ import annotations

from dataclasses import replace

from scoped_fn.state.autocast_scope import AutocastScope
from scoped_fn.state.compiler_state import CompilerState


def push_scope(state: CompilerState, scope: AutocastScope) -> CompilerState:
    """Returns the state with one more scope on top."""
    return replace(state, autocast=(*state.autocast, scope))


def pop_scope(state: CompilerState) -> CompilerState:
    """Returns the state without the scope on top.

    Raises:
        RuntimeError: No scope is open.
    """
    if not state.autocast:
        raise RuntimeError(
            "Expected an open autocast scope to end, got none. Open one with state = autocast(state, ...)."
        )
    return replace(state, autocast=state.autocast[:-1])


def active_scope(state: CompilerState) -> AutocastScope | None:
    """Returns the scope on top, if it changes anything."""
    scope = state.autocast[-1] if state.autocast else None
    return scope if scope is not None and scope.active else None
