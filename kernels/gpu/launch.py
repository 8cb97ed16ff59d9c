"""What every launcher asks: which GPU, and how much of it."""

from __future__ import annotations

from typing import Final

import torch

from scoped_fn.kernels._tiles import Tile, capability

# The GPU that the interpreter stands in for.
INTERPRETED_ARCH: Final = "cuda:90"
INTERPRETED_PROCESSORS: Final = 4


def arch_of(x: torch.Tensor) -> str:
    """Returns the architecture that holds `x`: "cuda:90", "hip:gfx942"; that of Hopper for a CPU tensor."""
    if not x.is_cuda:
        return INTERPRETED_ARCH
    properties = torch.cuda.get_device_properties(x.device)
    if torch.version.hip is not None:
        return f"hip:{properties.gcnArchName.split(':')[0]}"
    return f"cuda:{properties.major}{properties.minor}"


def processors(x: torch.Tensor) -> int:
    """Returns the number of streaming multiprocessors of the GPU that holds `x`; a fixed one for a CPU tensor."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else INTERPRETED_PROCESSORS


def rounds_first(arch: str) -> bool:
    """Returns whether a cast of float32 to FP8 is not to be trusted: it saturates and rounds once from Hopper on.

    Before, Triton goes through float16 and rounds twice; on AMD, what is too large overflows.
    """
    return not (arch.startswith("cuda") and capability(arch) >= 90)


def keeps_few_bits(arch: str) -> bool:
    """Returns whether tensor cores sum FP8 with about 14 bits through registers: Ada, and desktop Blackwell like it."""
    return arch.startswith("cuda") and (capability(arch) == 89 or capability(arch) >= 120)


def wide(tile: Tile, rows: int, columns: int, *tensors: torch.Tensor) -> bool:
    """Returns whether offsets inside of one tile of `(B, M, K)` tensors, or of their outputs, need 64 bits."""
    strides = [(x.stride(1), x.stride(2)) for x in tensors]
    strides += [(columns, 1), (1, rows)]
    return any(tile.block_m * m + tile.block_k * k >= 2**31 for m, k in strides)


def empty_quantized(x: torch.Tensor, dtype: torch.dtype, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns room for `x` quantized, `(B, M, K)`, and transposed, `(B, K, M)` or `(B, 0, 0)` without `transpose`."""
    batch, rows, columns = x.shape
    data = torch.empty((batch, rows, columns), dtype=dtype, device=x.device)
    turned = (batch, columns, rows) if transpose else (batch, 0, 0)
    return data, torch.empty(turned, dtype=dtype, device=x.device)


def has_tma(arch: str) -> bool:
    """Returns whether tiles go through the tensor memory accelerator: on Hopper and data center Blackwell.

    Desktop Blackwell (12x) has it too, but the shared memory of Ada, and so Ada's way through pointers.
    """
    return arch.startswith("cuda") and 90 <= capability(arch) < 120
