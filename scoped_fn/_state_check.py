"""The check that a first argument is a state."""

from __future__ import annotations

from typing import Any

from scoped_fn._errors import SpecError
from scoped_fn.state import CompilerState


def check_state(state: Any) -> None:
    """Raises `SpecError` unless `state` is a `CompilerState`."""
    if not isinstance(state, CompilerState):
        raise SpecError(
            f"Expected a CompilerState as the first argument, got a {type(state).__name__}. "
            "Start with state = sf.init_state() and pass on the state that each call returns."
        )
