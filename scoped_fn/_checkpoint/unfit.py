"""What a value or a file is refused with, before it is known which of the two it is."""

from __future__ import annotations

from typing import Any


class Unfit(Exception):  # noqa: N818 - never seen by a user: `save` and `load` turn it into a CheckpointError
    """Something does not have its place in a file of `save`.

    Attributes:
        expected: What should have been there.
        got: What is there.
        advice: What to do about it; None for the advice that suits the caller.
    """

    def __init__(self, expected: str, got: str, advice: str | None = None) -> None:
        super().__init__(expected, got)
        self.expected, self.got, self.advice = expected, got, advice

    def __str__(self) -> str:
        return f"Expected {self.expected}, got {self.got}."


def refusal(expected: str, got: Any, advice: str | None = None) -> Unfit:
    """Returns the error, with a short text of what was found."""
    return Unfit(expected, shown(got), advice)


def demand(holds: bool, expected: str, got: Any) -> None:
    """Raises `Unfit` unless something holds."""
    if not holds:
        raise refusal(expected, got)


def shown(value: Any) -> str:
    """Returns a value as a text of at most about 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
