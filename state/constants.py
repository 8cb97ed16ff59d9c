"""Constants: named facts of the outside world that compiled code may have been made for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from scoped_fn.state.compiler_state import CompilerState
from scoped_fn.state.exact import Exact


def set_constant(state: CompilerState, name: str, value: Any) -> CompilerState:
    """Returns the state in which a constant has a value.

    Code that read another value of it is compiled again when it is next called; code that did not read it stays.

    Args:
        state: Any state.
        name: Any name, such as `"ub.fprop.is_fp8"`.
        value: A number, string, None, dtype or device, or a tuple of such.

    Raises:
        TypeError: The name is no string, or the value is something else.

    Example:
        >>> from scoped_fn.state import init_state
        >>> set_constant(init_state(), "cuda.capability", (10, 0)).constants["cuda.capability"]
        (10, 0)
    """
    if not isinstance(name, str):
        raise TypeError(f"Expected the name of a constant as a string, got {name!r}. Pass a string.")
    if not _is_plain(value):
        raise TypeError(
            f"Expected plain, hashable data for the constant {name!r}, got a {type(value).__name__}. "
            "Pass numbers, strings, None, or tuples of them."
        )
    if name in state.constants and Exact(state.constants[name]) == Exact(value):
        return state
    return replace(state, constants=state.constants.set(name, value))


def drop_constant(state: CompilerState, name: str) -> CompilerState:
    """Returns the state without a constant.

    Raises:
        KeyError: It has no such constant.
    """
    if name not in state.constants:
        known = ", ".join(state.constants) or "none"
        raise KeyError(f"Expected one of the state's constants ({known}), got {name!r}. Drop only what was set.")
    return replace(state, constants=state.constants.drop(name))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device))
