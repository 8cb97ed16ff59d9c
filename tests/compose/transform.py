"""`Transform`: a named way to differentiate or batch a function of tensors."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.compose.case import Arguments, Case, Function

Apply = Callable[[Function, Arguments], Any]


class Meets(enum.Enum):
    """Which cases a transform is tried on."""

    EVERY = "every case"
    SOME = "one case in three: it is a variation of one that meets every case"
    DEEP = "small smooth cases: it takes third derivatives"


@dataclass(frozen=True, eq=False)
class Transform:
    """One transform or nesting.

    Attributes:
        name: Its name in test ids.
        apply: (function, arguments) -> tree of tensors.
        tags: For what eager cannot do: "batched" if vmap batches the function's own arguments, "forward" if forward
            mode is used, "second" if a derivative is differentiated again.
        meets: Which cases it is tried on.
    """

    name: str
    apply: Apply
    tags: frozenset[str]
    meets: Meets


def transform(name: str, *tags: str, meets: Meets = Meets.EVERY) -> Callable[[Apply], Transform]:
    """Makes a `Transform` of the function below it."""
    return lambda apply: Transform(name, apply, frozenset(tags), meets)


def refusal(case: Case, one: Transform) -> str | None:
    """Why eager torch cannot do this transform of this case; None if it can."""
    return next((why for what, why in case.eager_cannot.items() if what == one.name or what in one.tags), None)
