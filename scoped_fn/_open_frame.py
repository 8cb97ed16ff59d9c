"""`OpenFrame`: notices that the backward of a forward has run, or can no longer run."""

from __future__ import annotations

from typing import Any

from scoped_fn.state import Frame


class OpenFrame:
    """A hook of a node in autograd's graph; it lives as long as the node does.

    It only adds to a list, which is safe from any thread and from the garbage collector.
    """

    def __init__(self, ended: list[Frame], frame: Frame) -> None:
        """Adds `frame` to `ended`, once."""
        self._ended, self._frames = ended, [frame]

    def __call__(self, *gradients: Any) -> None:
        """Called after the node's backward."""
        if self._frames:
            self._ended.append(self._frames.pop())

    def __del__(self) -> None:
        """Called when the node is gone."""
        self()
