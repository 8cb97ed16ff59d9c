"""`set_override` and `effects`: settings of torch that one owner's compile calls run under."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scoped_fn._errors import SpecError
from scoped_fn._state_check import check_state
from scoped_fn._torch.config import OURS, PREFIXES, patched, setting_names, setting_value
from scoped_fn.state import CompilerState, FrozenDict, overrides_of
from scoped_fn.state.overrides import with_override


def set_override(state: CompilerState, owner: Any, key: str, value: Any) -> CompilerState:
    """Returns the state in which an owner's compile calls run with a setting of torch at a value.

    Nothing is set now. Each compile call of the owner sets it for its own time and thread (on torch 2.11, which has one
    value for all threads: for its own time), and puts back what was there before. What is compiled already stays.

    Args:
        state: A state that holds the owner.
        owner: A token, or anything with an `owner` attribute, such as a compiled function.
        key: The full path of a setting of `torch._inductor.config`, `torch._functorch.config` or
            `torch._dynamo.config`, such as `"torch._inductor.config.max_autotune"`.
        value: Of the type that the setting has now; hashable.

    Raises:
        SpecError: There is no such setting, or the value does not suit it.
        OwnershipError: The state does not hold the owner.

    Example:
        >>> import scoped_fn as sf
        >>> state, owner = sf.acquire(sf.init_state(), "encoder")
        >>> state = sf.set_override(state, owner, "torch._inductor.config.max_autotune", True)
        >>> sf.overrides_of(state, owner)
        FrozenDict({'torch._inductor.config.max_autotune': True})
    """
    check_state(state)
    _check_setting(key, value)
    return with_override(state, owner, key, value)


@contextmanager
def effects(state: CompilerState, owner: Any) -> Iterator[None]:
    """Makes an owner's overrides hold for the time of a block, in this thread.

    For your own code around a compile: what `compile` and its like run needs no such block.

    Args:
        state: A state that holds the owner.
        owner: A token, or anything with an `owner` attribute.

    Raises:
        OwnershipError: The state does not hold the owner.
    """
    check_state(state)
    with patched(overrides_of(state, owner)):
        yield


def known_overrides(state: CompilerState, token: int) -> FrozenDict[str, Any]:
    """Returns the overrides of an owner; none if the state does not hold it, as the stages take any state."""
    return overrides_of(state, token) if token in state.owners else FrozenDict()


def _check_setting(key: Any, value: Any) -> None:
    try:
        now = setting_value(str(key))
    except AttributeError:
        near = difflib.get_close_matches(str(key), setting_names(), 1)
        advice = f"Did you mean {near[0]!r}?" if near else f"They begin with {', '.join(PREFIXES)}."
        raise SpecError(f"Expected the full path of a setting of torch, got {key!r}. {advice}") from None
    if key in OURS:
        raise SpecError(
            f"Expected a setting that compile does not set itself, got {key!r}. For random numbers use rng=...."
        )
    try:
        hash(value)
    except TypeError:
        raise SpecError(
            f"Expected a hashable value for {key}, got a {type(value).__name__}. Pass plain data."
        ) from None
    if now is not None and not _suits(now, value):
        raise SpecError(
            f"Expected a value of {key} like {now!r}, a {type(now).__name__}, got {value!r}. Pass one of that type."
        )


def _suits(now: Any, value: Any) -> bool:
    if isinstance(now, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(now)
