"""Values in a structure that compare by what they are, not only by `==`, or that do not matter to whether it is alike.

1, 1.0 and True are three values, 0.0 and -0.0 two, NaN is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Exact:
    """A value as part of a structure; code that was made for it is not right for one that is merely equal."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Exact):
            return NotImplemented
        return self.value is other.value or bool(exact_form(self.value) == exact_form(other.value))

    def __hash__(self) -> int:
        return hash(exact_form(self.value))


@dataclass(frozen=True, eq=False)
class Aside:
    """A value that a structure carries along; structures are alike whatever it is."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Aside)

    def __hash__(self) -> int:
        return hash(Aside)


def exact_form(value: Any) -> Any:
    """Returns what two values have in common if and only if they are the same and of one type."""
    if isinstance(value, Mapping):
        return type(value), frozenset((exact_form(key), exact_form(held)) for key, held in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(exact_form, value))
    if isinstance(value, frozenset):
        return type(value), frozenset(map(exact_form, value))
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return type(value), value.tobytes()
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, complex):
        return type(value), value.real.hex(), value.imag.hex()
    return type(value), value
