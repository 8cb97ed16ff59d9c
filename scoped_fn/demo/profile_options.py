"""What a user may choose about ``scoped-fn profile``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from scoped_fn.demo.gpt import GPTConfig
from scoped_fn.demo.precision import UNQUANTIZED
from scoped_fn.demo.schedule import NamedPasses


@dataclass(frozen=True)
class ProfileOptions:
    """The options of ``scoped-fn profile``.

    Attributes:
        seed: Seeds weights and the batch; below 2**32.
        backend: What the graphs are lowered for, ``"eager"`` or ``"inductor"``; their nodes run one by one either way.
        recipe: How matmuls are quantized, one of `RECIPES`; "none" for not at all.
        passes: What to profile the step with, beside the step without; None for the latter alone.
        out: Folder for the picture and the numbers.
        top: Rows of each table of nodes.
        text: File that the batch is from, or None for Python's own manual.
        batch: Examples B in the step.
        model: Size of the model; its context T is the length of one example.
    """

    seed: int = 0
    backend: str = "eager"
    recipe: str = UNQUANTIZED
    passes: NamedPasses | None = None
    out: Path = Path("runs/profile")
    top: int = 10
    text: Path | None = None
    batch: int = 16
    model: GPTConfig = field(default_factory=GPTConfig)
