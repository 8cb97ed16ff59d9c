"""What launchers ask of the machine, and offsets of 64 bits."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from scoped_fn.kernels._tiles import Tile
from scoped_fn.kernels.gpu import blocks, dequantize, gate, launch, mx, norms, quantize
from tests.kernels.interpreted.guarded import assert_all_same
from tests.kernels.interpreted.inputs import E4M3, arranged, numbers

X = arranged(numbers((2, 70, 300), torch.bfloat16, 0), "transposed")
ONES = torch.ones(2)
WEIGHT = torch.rand(2, 300)
CALLS: list[tuple[ModuleType, str, tuple[Any, ...]]] = [
    (quantize, "quantize", (X, ONES[:, None], E4M3, True)),
    (quantize, "quantize", (X, torch.ones(2, 70), E4M3, True)),
    (quantize, "quantize_current", (X, E4M3, False, 0.0, True)),
    (blocks, "quantize_blocks", (X, E4M3, 1, False, 0.0, True)),
    (blocks, "quantize_blocks", (X, E4M3, 128, False, 0.0, True)),
    (mx, "quantize_mx", (X, E4M3, True)),
    (dequantize, "dequantize", (X.to(E4M3), torch.rand(2, 3, 70).mT, torch.float32)),
    (norms, "rms_norm_quantize", (X, WEIGHT, ONES, 1e-5, E4M3, False)),
    (norms, "layer_norm_quantize", (X, WEIGHT, WEIGHT, ONES, 1e-5, E4M3, True)),
    (gate, "silu_gate_quantize", (X, X, ONES, E4M3, True)),
]


@pytest.mark.parametrize(("module", "name", "arguments"), CALLS, ids=lambda value: value if type(value) is str else "")
def test_wide_offsets(
    module: ModuleType, name: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = getattr(module, name)(*arguments)
    monkeypatch.setattr(module, "wide", lambda *given: True)
    wide = getattr(module, name)(*arguments)
    assert_all_same(*((x,) if isinstance(x, torch.Tensor) else x for x in (wide, narrow)))


def far(rows_apart: int, columns_apart: int) -> torch.Tensor:
    return torch.empty_strided((1, 1000, 1000), (1, rows_apart, columns_apart), device="meta")


@pytest.mark.parametrize(
    ("rows_apart", "columns_apart", "wide"),
    [(1000, 1, False), (1, 2**23 - 1, False), (1, 2**23, True), (2**27, 1, True), (2**27 - 2**5, 1, False)],
)
def test_when_offsets_are_wide(rows_apart: int, columns_apart: int, wide: bool) -> None:
    tile = Tile(block_m=16, block_k=256)
    assert launch.wide(tile, 1000, 1000, far(rows_apart, columns_apart)) is wide


def test_outputs_may_be_wider_than_inputs() -> None:
    tile = Tile(block_m=64, block_k=64)
    assert launch.wide(tile, 10, 2**26, far(0, 1))
    assert launch.wide(tile, 2**26, 10, far(0, 1))


def test_the_interpreter_stands_in_for_hopper() -> None:
    x = torch.zeros(1)
    assert launch.arch_of(x) == "cuda:90"
    assert launch.processors(x) == 4


@pytest.mark.parametrize(
    ("arch", "later"), [("cuda:89", False), ("cuda:90", True), ("cuda:100", True), ("hip:gfx942", False)]
)
def test_what_came_with_hopper(arch: str, later: bool) -> None:
    assert launch.has_tma(arch) is later
    assert launch.rounds_first(arch) is not later
