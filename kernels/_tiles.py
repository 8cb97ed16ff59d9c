"""Launch configurations of the Triton kernels: a frozen table by kernel and shape, and nothing tuned at run time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from scoped_fn.kernels._formats import ceil_div


@dataclass(frozen=True)
class Tile:
    """How one kernel is launched.

    Attributes:
        block_m: Rows of a tile; of the history, for `update_scales`.
        block_n: Columns of a tile of a product; columns of the history, for `update_scales`.
        block_k: Columns of a tile of `x`; of the contracted dimension, for a product.
        warps: Warps of a program.
        stages: Stages of the software pipeline.
        group: Rows of tiles that a product walks column by column, so that they share operands in the L2 cache;
            programs for each multiprocessor, for `amax`.
        epilogue: Parts that a product writes a tile in; more parts take less shared memory.
    """

    block_m: int = 1
    block_n: int = 1
    block_k: int = 1
    warps: int = 4
    stages: int = 1
    group: int = 8
    epilogue: int = 1

    def count(self, batch: int, rows: int, columns: int) -> int:
        """Returns how many tiles of `block_m` by `block_k` cover `batch` matrices."""
        return batch * ceil_div(rows, self.block_m) * ceil_div(columns, self.block_k)

    def divides(self, rows: int, columns: int) -> bool:
        """Returns whether tiles of `block_m` by `block_k` cover a matrix with none over its edges."""
        return rows % self.block_m == 0 and columns % self.block_k == 0


# A key is a kernel, its variant, the class of its shape, and an architecture; "" stands for all that have no entry of
# their own. (Blocks on gfx950 have one stage: Triton 3.6 fails on their pipelined loop.) `scoped-fn tune` rewrites what
# stands between the next line and its counterpart.
# The table begins.
TILES: Final[Mapping[tuple[str, str, str, str], Tile]] = MappingProxyType(
    {
        ("quantize", "", "", ""): Tile(block_m=16, block_k=256),
        ("quantize", "", "", "cuda:89"): Tile(block_m=8, block_k=256),
        ("quantize", "transpose", "", ""): Tile(block_m=64, block_k=128),
        ("amax", "", "", ""): Tile(block_m=16, block_k=512, warps=8, group=4),
        ("quantize_blocks", "1", "", ""): Tile(block_m=32, block_k=128),
        ("quantize_blocks", "1 transpose", "", ""): Tile(block_m=128, block_k=128, warps=8),
        ("quantize_blocks", "1 transpose", "", "cuda:89"): Tile(block_m=128, block_k=128, warps=16),
        ("quantize_blocks", "128", "", ""): Tile(block_m=128, block_k=128, warps=8),
        ("quantize_blocks", "128 transpose", "", ""): Tile(block_m=128, block_k=128, warps=8),
        ("quantize_mx", "", "", ""): Tile(block_m=32, block_k=128),
        ("quantize_mx", "transpose", "", ""): Tile(block_m=32, block_k=128, warps=2),
        ("dequantize", "", "", ""): Tile(block_m=16, block_k=256),
        ("silu_gate_quantize", "", "", ""): Tile(block_m=16, block_k=256),
        ("silu_gate_quantize", "", "", "cuda:89"): Tile(block_m=8, block_k=256),
        ("silu_gate_quantize", "transpose", "", ""): Tile(block_m=64, block_k=64),
        ("norm_quantize", "", "128", ""): Tile(block_m=32, block_k=128),
        ("norm_quantize", "", "256", ""): Tile(block_m=16, block_k=256),
        ("norm_quantize", "", "512", ""): Tile(block_m=8, block_k=512),
        ("norm_quantize", "", "1024", ""): Tile(block_m=4, block_k=1024),
        ("norm_quantize", "", "2048", ""): Tile(block_m=2, block_k=2048),
        ("norm_quantize", "", "4096", ""): Tile(block_k=4096),
        ("norm_quantize", "", "8192", ""): Tile(block_k=8192, warps=8),
        ("norm_quantize", "", "", ""): Tile(block_m=4, block_k=1024),
        ("norm_quantize", "transpose", "", ""): Tile(block_m=32, block_k=128, warps=8),
        ("update_scales", "", "", ""): Tile(block_m=64, block_n=32),
        ("scaled_mm", "fast tma", "", ""): Tile(block_m=128, block_n=256, block_k=128, warps=8, stages=4, epilogue=2),
        ("scaled_mm", "fast tma", "medium", ""): Tile(block_m=128, block_n=128, block_k=128, stages=4),
        ("scaled_mm", "fast tma", "", "cuda:100"): Tile(block_m=128, block_n=128, block_k=128, warps=8, stages=4),
        ("scaled_mm", "fast tma", "medium", "cuda:100"): Tile(block_m=128, block_n=128, block_k=128, warps=8, stages=4),
        ("scaled_mm", "fast tma", "low", ""): Tile(block_m=64, block_n=128, block_k=128, stages=4),
        ("scaled_mm", "split tma", "", ""): Tile(block_m=128, block_n=128, block_k=128, warps=8, stages=4),
        ("scaled_mm", "split tma", "low", ""): Tile(block_m=64, block_n=128, block_k=128, stages=4),
        ("scaled_mm", "blocks tma", "", ""): Tile(block_m=128, block_n=128, block_k=128, warps=8, stages=4),
        ("scaled_mm", "blocks tma", "low", ""): Tile(block_m=64, block_n=128, block_k=128, stages=4),
        ("scaled_mm", "fast", "", ""): Tile(block_m=128, block_n=128, block_k=128, warps=8, stages=3),
        ("scaled_mm", "split", "", ""): Tile(block_m=128, block_n=128, block_k=128, warps=8, stages=3),
        ("scaled_mm", "blocks", "", ""): Tile(block_m=128, block_n=128, block_k=128, warps=8, stages=3),
        ("scaled_mm", "blocks", "", "cuda:120"): Tile(block_m=64, block_n=64, block_k=128, stages=3),
        ("scaled_mm", "blocks", "low", "cuda:120"): Tile(block_m=64, block_n=64, block_k=128, stages=3),
        ("scaled_mm", "blocks", "", "hip:gfx950"): Tile(block_m=128, block_n=128, block_k=128, warps=8),
        ("scaled_mm", "blocks", "low", "hip:gfx950"): Tile(block_m=64, block_n=128, block_k=128),
        ("scaled_mm", "blocks", "", "hip:gfx942"): Tile(block_m=64, block_n=64, block_k=128),
        ("scaled_mm", "blocks", "low", "hip:gfx942"): Tile(block_m=64, block_n=64, block_k=128),
        ("scaled_mm", "fast", "low", ""): Tile(block_m=64, block_n=128, block_k=128, stages=3),
        ("scaled_mm", "split", "low", ""): Tile(block_m=64, block_n=128, block_k=128, stages=3),
        ("scaled_mm", "blocks", "low", ""): Tile(block_m=64, block_n=128, block_k=128, stages=3),
    }
)
# The table ends.


def tile_for(kernel: str, rows: int, columns: int, *, variant: str = "", arch: str = "") -> Tile:
    """Returns the launch configuration of a kernel: the most special entry of the table that fits.

    Args:
        kernel: Name of the launcher.
        rows: M.
        columns: K; N for a product.
        variant: What else the kernel is compiled for, as in the table: "transpose", "fast".
        arch: As `scoped_fn.kernels.gpu.launch.arch_of` returns it.
    """
    size = size_of(kernel, rows, columns)
    for shape_class in (size, ""):
        for target in (arch, family_of(arch), ""):
            tile = TILES.get((kernel, variant, shape_class, target))
            if tile is not None:
                return tile
    raise LookupError(f"Expected a tile for {kernel!r}, got none for variant {variant!r}. Add one to TILES.")


def capability(arch: str) -> int:
    """Returns the number of a CUDA architecture: 90 of "cuda:90"."""
    return int(arch.partition(":")[2])


def family_of(arch: str) -> str:
    """Returns the architecture whose tiles fit another one: its shared memory and tensor cores are alike."""
    if not arch.startswith("cuda"):
        return arch
    return "cuda:100" if 100 <= capability(arch) < 120 else "cuda:120" if capability(arch) >= 120 else arch


def size_of(kernel: str, rows: int, columns: int) -> str:
    """Returns the class of a shape, for one kernel; "" for the kernels that have no classes."""
    if kernel == "norm_quantize":
        # A row that fits is read once. 8192 float32 numbers are the most that 8 warps keep in registers.
        return str(max(128, 1 << (columns - 1).bit_length())) if columns <= 8192 else ""
    if kernel == "scaled_mm":
        # Hopper's tensor cores take 64 rows; larger tiles than needed would leave multiprocessors without one.
        return "low" if rows <= 64 else "medium" if rows * columns <= 2048 * 2048 else ""
    return ""
