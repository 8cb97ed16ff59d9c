"""The FP8 kernels on a CPU. Bars: a linear layer 3 times a bfloat16 matmul, the update of scales 2 passes."""

from __future__ import annotations

import sys

import torch

from scoped_fn.kernels import quantize, quantize_blocks, scaled_mm, update_scales
from tests.bench.measure import Row, medians_us, print_table

SIZE = 1024
LENGTH, SITES = 1024, 1000
NO_BAR = float("inf")


def rows() -> list[Row]:
    return [*_linear(), *_update()]


def _linear() -> list[Row]:
    torch.manual_seed(0)
    x, w = torch.randn(SIZE, SIZE).bfloat16(), torch.randn(SIZE, SIZE).bfloat16()
    scale, e4m3 = torch.tensor(64.0), torch.float8_e4m3fn

    def linear() -> torch.Tensor:
        return scaled_mm(quantize(x, scale, e4m3), quantize(w, scale, e4m3).mT)

    def linear_in_blocks() -> torch.Tensor:
        return scaled_mm(quantize_blocks(x, e4m3), quantize_blocks(w, e4m3, block_rows=128).mT)

    exact = x.float() @ w.float().T
    for result in (linear(), linear_in_blocks()):
        assert (result - exact).norm() < 0.05 * exact.norm()
    times = medians_us({"mm": lambda: x @ w.T, "linear": linear, "blocks": linear_in_blocks}, rounds=40)
    what = {"linear": ("FP8 linear, scales per tensor", 3.0), "blocks": ("FP8 linear, scales per block", NO_BAR)}
    return [
        _row(f"{title}: quantize twice, amax, matmul, {SIZE}^3", "bfloat16 mm", times[name], times["mm"], bar)
        for name, (title, bar) in what.items()
    ]


def _update() -> list[Row]:
    history, scale = torch.rand(LENGTH, SITES) + 0.1, torch.ones(SITES)
    idle = history.clone()
    idle[0, ::10] = 0
    times = medians_us(
        {
            "update": lambda: update_scales(history, scale, fp8_max=448.0),
            "update, some idle": lambda: update_scales(idle, scale, fp8_max=448.0),
            "reading pass": lambda: history.amax(0),
            "copy": lambda: history.clone(),
        },
        rounds=200,
        calls=5,
    )
    what = f"update_scales, {SITES} sites, history of {LENGTH}"
    return [
        _row(what, "one reading pass: history.amax(0)", times["update"], times["reading pass"], 2.0),
        _row(what, "one copying pass: history.clone()", times["update"], times["copy"], NO_BAR),
        _row(f"{what}, a tenth idle", "history.amax(0)", times["update, some idle"], times["reading pass"], NO_BAR),
    ]


def _row(what: str, baseline: str, ours: float, theirs: float, bar: float) -> Row:
    return Row(what, baseline, f"{ours:.1f} us", f"{theirs:.1f} us", ours / theirs, bar)


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
