"""`Plan`: how `compile` was asked to compile, so that later variants are made the same way."""

from __future__ import annotations

from dataclasses import dataclass

from scoped_fn._backends import Backend
from scoped_fn.passes import Passes


@dataclass(frozen=True)
class Plan:
    """The options of one `compile`.

    Attributes:
        backend: What turns graphs into code.
        passes: The user's passes.
        capture: "dynamo" or "trace".
    """

    backend: Backend
    passes: Passes
    capture: str
