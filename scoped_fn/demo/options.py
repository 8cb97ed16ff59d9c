"""What a user may choose about a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from scoped_fn.demo.gpt import GPTConfig
from scoped_fn.demo.precision import UNQUANTIZED
from scoped_fn.demo.schedule import NamedSchedule


@dataclass(frozen=True)
class TrainOptions:
    """The options of ``scoped-fn train``.

    Attributes:
        steps: Steps in the whole run, those of a resumed checkpoint included.
        seed: Seeds weights, batches and the sampled text; below 2**32.
        backend: ``"inductor"`` or ``"eager"``.
        recipe: How matmuls are quantized, one of `RECIPES`; "none" for not at all.
        schedule: Which passes the step is compiled with, and from which step on; None for no pass ever.
        out: Folder for the loss curve and the metrics.
        checkpoint: File to save to, and to resume from where it exists, or None.
        resume: File to resume from, which has to exist, or None; also saved to where there is no `checkpoint`.
        text: File to train on, or None for Python's own manual.
        compare: Whether to train with every recipe, one after the other, instead of one.
        timing: Whether to time steps at the end.
        batch: Examples B in one step.
        model: Size of the model; its context T is the length of one example.
    """

    steps: int = 600
    seed: int = 0
    backend: str = "inductor"
    recipe: str = UNQUANTIZED
    schedule: NamedSchedule | None = None
    out: Path = Path("runs/train")
    checkpoint: Path | None = None
    resume: Path | None = None
    text: Path | None = None
    compare: bool = False
    timing: bool = True
    batch: int = 16
    model: GPTConfig = field(default_factory=GPTConfig)

    @property
    def saves_to(self) -> Path | None:
        """The file that the run is saved to, or None."""
        return self.resume if self.checkpoint is None else self.checkpoint

    @property
    def tokens_per_step(self) -> int:
        """The number of targets that one step's loss is the mean of."""
        return self.batch * self.model.context
