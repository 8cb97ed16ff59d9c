"""A call of each Triton kernel at the sizes that its launch configuration is tuned for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scoped_fn.kernels._formats import BLOCK, E4M3, ceil_div
from scoped_fn.kernels._tiles import Tile

Run = Callable[[Tile | None], tuple[Tensor, ...]]
FREE = ("block_m", "block_k", "warps", "stages")


@dataclass(frozen=True)
class Case:
    """A kernel and what it is called with.

    Attributes:
        kernel: As in the table of tiles.
        variant: As in the table of tiles.
        rows: M.
        columns: K; N for a product.
        prepare: Makes the arguments on the GPU; returns the call, by a configuration (None: that of the table).
        bytes: Read and written by a call.
        flops: Of a call.
        vary: The fields of a configuration that may change; the others are part of what the kernel means. Without any,
            the case is there to be timed.
        exact: Whether every configuration gives the same bits.
    """

    kernel: str
    variant: str
    rows: int
    columns: int
    prepare: Callable[[], Run]
    bytes: int
    flops: int = 0
    vary: tuple[str, ...] = FREE
    exact: bool = True


def cases(size: int = 8192) -> Iterator[Case]:
    """Yields every kernel in every variant and shape class, the big ones at `size` rows and columns."""
    yield from _quantizers(size)
    for width in (128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        yield _norm(size, width, False)
    yield _norm(size, 4096, True)
    yield _update(1024, 1000)
    for rows, columns, inner in ((size, size, 4096), (2048, 2048, 4096), (64, 4096, 4096)):
        for fast, blocks in ((True, False), (False, False), (False, True)):
            yield _product(rows, columns, inner, fast, blocks)


def _quantizers(size: int) -> Iterator[Case]:
    from scoped_fn.kernels.gpu import blocks, dequantize, gate, mx, quantize

    elements = size * size
    scale = torch.full((1, 1), 8.0)
    for transpose in (False, True):
        word, data_bytes = "transpose" if transpose else "", elements * (2 + transpose)
        both = (E4M3, transpose)
        yield _elementwise("quantize", word, size, quantize.quantize, 1, (scale, *both), elements + data_bytes)
        for rows, blocked in ((1, ("block_m", "warps", "stages")), (BLOCK, ("warps", "stages"))):
            arguments, variant = (E4M3, rows, True, 0.0, transpose), f"{rows} {word}".strip()
            vary = ("warps", "stages") if transpose else blocked
            yield _elementwise(
                "quantize_blocks", variant, size, blocks.quantize_blocks, 1, arguments, elements + data_bytes, vary
            )
        yield _elementwise("quantize_mx", word, size, mx.quantize_mx, 1, both, elements + data_bytes)
        yield _elementwise(
            "silu_gate_quantize", word, size, gate.silu_gate_quantize, 2, (scale[0], *both), 3 * elements + data_bytes
        )
        # Its tile is that of "quantize", so there is nothing of its own to vary.
        current = (E4M3, False, 0.0, transpose)
        yield _elementwise(
            "quantize",
            f"current {word}".strip(),
            size,
            quantize.quantize_current,
            1,
            current,
            3 * elements + data_bytes,
            (),
        )
    yield _elementwise("amax", "", size, _one(quantize.amax), 1, (), 2 * elements)

    yield _elementwise(
        "dequantize",
        "",
        size,
        _one(dequantize.dequantize),
        1,
        (torch.ones(1, size, ceil_div(size, BLOCK)), torch.bfloat16),
        3 * elements,
        ("block_m", "warps", "stages"),
        dtype=E4M3,
    )


def _one(launch: Callable[..., Tensor]) -> Callable[..., tuple[Tensor]]:
    return lambda *arguments, tile: (launch(*arguments, tile=tile),)


def _elementwise(
    kernel: str,
    variant: str,
    size: int,
    launch: Callable[..., Any],
    inputs: int,
    arguments: tuple[Any, ...],
    moved: int,
    vary: tuple[str, ...] = FREE,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    def prepare() -> Run:
        tensors = [torch.randn(1, size, size, device="cuda").to(dtype) for _ in range(inputs)]
        on_gpu = [a.cuda() if isinstance(a, Tensor) else a for a in arguments]
        return lambda tile: tuple(launch(*tensors, *on_gpu, tile=tile))

    return Case(kernel, variant, size, size, prepare, moved, vary=vary)


def _norm(rows: int, width: int, transpose: bool) -> Case:
    from scoped_fn.kernels.gpu.norms import rms_norm_quantize

    def prepare() -> Run:
        x = torch.randn(1, rows, width, device="cuda").bfloat16()
        weight, scale = torch.ones(1, width, device="cuda"), torch.full((1,), 8.0, device="cuda")
        return lambda tile: tuple(rms_norm_quantize(x, weight, scale, 1e-6, E4M3, transpose, tile=tile))

    vary = ("block_m", "warps", "stages") if not transpose and width <= 8192 else FREE
    moved = rows * width * (4 if transpose else 3)
    return Case("norm_quantize", "transpose" if transpose else "", rows, width, prepare, moved, vary=vary, exact=False)


def _update(length: int, sites: int) -> Case:
    from scoped_fn.kernels.gpu.scales import update_scales

    def prepare() -> Run:
        history = torch.rand(1, length, sites, device="cuda")
        ones = torch.ones(1, sites, device="cuda")
        return lambda tile: tuple(update_scales(history, ones, ones, False, 0.0, tile=tile))

    vary = ("block_m", "block_n", "warps", "stages")
    return Case("update_scales", "", length, sites, prepare, 8 * length * sites, vary=vary)


def _product(rows: int, columns: int, inner: int, fast: bool, blocks: bool) -> Case:
    from scoped_fn.kernels.gpu.matmul import scaled_mm

    def prepare() -> Run:
        a, b = (torch.randn(1, size, inner, device="cuda").to(E4M3) for size in (rows, columns))
        # Scales of rows, and a bias: what takes the most room.
        size_a, size_b = rows, ceil_div(columns, BLOCK) if blocks else columns
        groups = ceil_div(inner, BLOCK) if blocks else 1
        scale_a = torch.ones(1, groups, size_a, device="cuda").mT
        scale_b = torch.ones(1, groups, size_b, device="cuda").mT
        bias = torch.zeros(1, columns, device="cuda")
        return lambda tile: (scaled_mm(a, b, scale_a, scale_b, bias, torch.bfloat16, fast, tile=tile),)

    variant = f"{'blocks' if blocks else 'fast' if fast else 'split'} tma"
    moved = inner * (rows + columns) + 2 * rows * columns
    vary = ("block_m", "block_n", "warps", "stages", "group")
    flops = 2 * rows * columns * inner
    return Case("scaled_mm", variant, rows, columns, prepare, moved, flops, vary=vary, exact=False)
