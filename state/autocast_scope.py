"""One scope of FP8 autocast, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AutocastScope:
    """One scope of FP8 autocast; hashable, compares by value.

    Attributes:
        recipe: How tensors are quantized; None only where nothing is.
        enabled: Whether matmuls run in FP8.
        calibrating: Whether they run in high precision and record amaxes.
        skip: Patterns of the names of layers that stay in high precision.
        group: The name of the ranks that share amaxes, or None.
        sites: "parameters" or "all": which matmuls.
    """

    recipe: Any
    enabled: bool = True
    calibrating: bool = False
    skip: tuple[str, ...] = ()
    group: str | None = None
    sites: str = "parameters"

    @property
    def active(self) -> bool:
        """Whether it changes anything."""
        return self.enabled or self.calibrating
