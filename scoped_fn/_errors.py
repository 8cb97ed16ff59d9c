"""The errors of the front door; each one is a subclass of a built-in error."""

from __future__ import annotations


class CaptureError(RuntimeError):
    """The model cannot be captured as one pure graph. The text holds the user's file and line."""


class MutationError(CaptureError):
    """The model changes an argument in place; a pure function cannot."""


class RandomOpError(CaptureError):
    """The model draws random numbers and nothing says from where."""


class StaleConstant(RuntimeError):  # noqa: N818 - it names a state of affairs, as KeyboardInterrupt does
    """Code that read a constant was called with a state in which it has another value."""


class SpecError(TypeError):
    """An argument has the wrong structure, shape, dtype or device, or an option has a value that does not exist."""


class CheckpointError(ValueError):
    """A value cannot be saved, or a file is none that `save` made, is damaged, or is of a newer version."""
