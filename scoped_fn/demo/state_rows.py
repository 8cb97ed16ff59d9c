"""A state as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator

from scoped_fn.state import AutocastScope, CompilerState, overrides_of

Row = tuple[str, str]


def state_rows(state: CompilerState) -> Iterator[Row]:
    """Yields what a state holds besides buffers and scales: key, scopes, constants, owners with their overrides."""
    yield "key", f"{tuple(state.key.tolist())}"
    yield "next token", f"{state.next_token}"
    for number, scope in enumerate(state.autocast):
        yield f"scope {number}", _scope(scope)
    for name, value in state.constants.items():
        yield f"constant {name}", repr(value)
    for token, owner in state.owners.items():
        yield f"owner {token}", str(owner)
        yield from _parts(state, token)


def _parts(state: CompilerState, token: int) -> Iterator[Row]:
    for setting, value in overrides_of(state, token).items():
        yield f"owner {token} override", f"{setting} = {value!r}"
    if token in state.buffers:
        yield f"owner {token} buffers", f"{len(state.buffers[token])}"
    if token in state.fp8:
        held = state.fp8[token]
        yield f"owner {token} FP8", f"{len(held.columns)} columns, {held.recipe}"
    if token in state.inputs:
        yield f"owner {token} inputs", f"{len(state.inputs[token].entries)} calls, {state.inputs[token].spec}"


def _scope(scope: AutocastScope) -> str:
    parts = ["enabled" if scope.enabled else "calibrating" if scope.calibrating else "off", f"{scope.recipe}"]
    parts += [f"skip {', '.join(scope.skip)}"] if scope.skip else []
    parts += [f"group {scope.group}"] if scope.group is not None else []
    return "; ".join([*parts, f"sites {scope.sites}"])
