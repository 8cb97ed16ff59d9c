"""The text of small graphs, word for word.

``python -m tests.stages.test_golden`` writes the files anew; read the diff before committing it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.stages.pipelines import MODELS, inference_chain, texts, training_chain

FOLDER = Path(__file__).with_name("golden")


class Counts(nn.Module):
    """A buffer that changes in place, a constant, and an output that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.shift = torch.ones(2)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return x * self.scale + self.shift, x


def counts() -> tuple[nn.Module, tuple[Any, ...]]:
    return Counts(), (torch.ones(3, 2),)


BUILDERS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "linear": MODELS["linear"],
    "dictionary": MODELS["dictionary"],
    "counts": counts,
}
SMALL = [
    ("linear", "captured"), ("linear", "joint"), ("linear", "forward"), ("linear", "backward"), ("linear", "inference"),
    ("counts", "captured"), ("counts", "joint"), ("counts", "forward"), ("counts", "backward"), ("counts", "inference"),
    ("dictionary", "captured"), ("dictionary", "forward"), ("dictionary", "inference"),
]  # fmt: skip


def _text(name: str, level: str) -> str:
    build = inference_chain if level == "inference" else training_chain
    return texts(build(*BUILDERS[name]()))[level] + "\n"


@pytest.mark.parametrize(("name", "level"), SMALL)
def test_graph_text_is_as_recorded(name: str, level: str) -> None:
    assert _text(name, level) == (FOLDER / f"{name}_{level}.txt").read_text(encoding="utf-8")


def test_every_recorded_text_is_tested_and_small() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {f"{name}_{level}" for name, level in SMALL}
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < 24 for path in FOLDER.glob("*.txt"))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for model_name, graph_level in SMALL:
        (FOLDER / f"{model_name}_{graph_level}.txt").write_text(_text(model_name, graph_level), encoding="utf-8")
