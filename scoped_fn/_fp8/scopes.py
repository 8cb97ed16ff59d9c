"""`autocast`, `end_autocast`, `with_autocast`: scopes of FP8 as pure operations on the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scoped_fn._errors import SpecError
from scoped_fn._state_check import check_state
from scoped_fn.recipes import Recipe
from scoped_fn.state import AutocastScope, CompilerState, pop_scope, push_scope


def autocast(
    state: CompilerState,
    recipe: Recipe | None,
    *,
    enabled: bool = True,
    calibrating: bool = False,
    skip: Sequence[str] = (),
    group: str | None = None,
    sites: str = "parameters",
) -> CompilerState:
    """Returns the state with one more scope: functions compiled and called with it run their matmuls in FP8.

    A scope replaces the one below it as a whole.

    Args:
        state: Any state.
        recipe: How tensors are quantized; may be None where nothing is.
        enabled: False for a scope in high precision.
        calibrating: Whether to compute in high precision and record amaxes, in calls without gradients too.
        skip: Names of layers that stay in high precision: whole, their last parts, or globs.
        group: The name of the ranks that share amaxes; kept with the scope.
        sites: "parameters" for products with a parameter, "all" for products of two activations too.

    Raises:
        SpecError: An option is not what it should be.

    Example:
        >>> import scoped_fn as sf
        >>> state = sf.autocast(sf.init_state(), sf.DelayedScaling(margin=1), skip=("head",))
        >>> state.autocast[-1].recipe.margin, sf.end_autocast(state).autocast
        (1, ())
    """
    check_state(state)
    if not isinstance(recipe, Recipe) and (recipe is not None or enabled or calibrating):
        raise SpecError(
            f"Expected a recipe, got {recipe!r}. Write sf.DelayedScaling(), or enabled=False for high precision."
        )
    for name, value in (("enabled", enabled), ("calibrating", calibrating)):
        if not isinstance(value, bool):
            raise SpecError(f"Expected {name} to be True or False, got {value!r}. Pass a bool.")
    if isinstance(skip, str) or not all(isinstance(pattern, str) for pattern in skip):
        raise SpecError(f"Expected skip as a tuple of names, got {skip!r}. Write skip=('head',).")
    if group is not None and not isinstance(group, str):
        raise SpecError(f"Expected group to be a name or None, got {group!r}. Pass the name of a process group.")
    if sites not in ("parameters", "all"):
        raise SpecError(f"Expected sites to be 'parameters' or 'all', got {sites!r}. Choose one of them.")
    return push_scope(state, AutocastScope(recipe, enabled, calibrating, tuple(skip), group, sites))


def end_autocast(state: CompilerState) -> CompilerState:
    """Returns the state without its innermost scope.

    Raises:
        RuntimeError: No scope is open.
    """
    check_state(state)
    return pop_scope(state)


def with_autocast(
    state: CompilerState, recipe: Recipe | None, f: Callable[..., tuple[CompilerState, Any]], *args: Any, **options: Any
) -> tuple[CompilerState, Any]:
    """Returns what `f(state, *args)` returns, called in a scope that is closed again.

    Args:
        state: Any state.
        recipe: As in `autocast`.
        f: A stateful function.
        args: Its arguments.
        options: Those of `autocast`.

    Example:
        >>> import scoped_fn as sf
        >>> sf.with_autocast(sf.init_state(), None, lambda state, x: (state, x + 1), 1, enabled=False)[1]
        2
    """
    state, out = f(autocast(state, recipe, **options), *args)
    return end_autocast(state), out
