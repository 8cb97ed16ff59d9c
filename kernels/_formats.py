"""FP8 formats, and the layout of scales, which their shape tells."""

from __future__ import annotations

from math import prod
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

E4M3: Final = torch.float8_e4m3fn
E5M2: Final = torch.float8_e5m2
# The largest finite value of each format.
FP8_MAX: Final = MappingProxyType({E4M3: 448.0, E5M2: 57344.0})
FLOAT32_MAX: Final = 3.4028234663852886e38
# The magnitudes of the codes 0 to 7 of E2M1; 8 more is the sign.
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Elements that share a scale: in Float8BlockScaling, along one or both dimensions; in MXFP8, along rows; in NVFP4.
BLOCK: Final = 128
MX_BLOCK: Final = 32
NVFP4_BLOCK: Final = 16


def ceil_div(a: int, b: int) -> int:
    """Returns `a / b` rounded up."""
    return -(-a // b)


def as_rows(x: Tensor) -> Tensor:
    """Returns x (..., K) as a matrix (M, K) with M the product of the leading sizes."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


def block_shape(data: Tensor, scale_inv: Tensor) -> tuple[int, int]:
    """Returns how many rows and columns of a matrix share a scale.

    Args:
        data: `(..., M, K)`, FP8 codes, or E2M1 codes in uint8.
        scale_inv: `(..., R, C)`: in float32, R is 1, `ceil(M / 128)` or M, and C is 1 or `ceil(K / 128)`; E8M0 (uint8),
            R is M and C is `ceil(K / 32)`; E4M3, R is M or `ceil(M / 16)` and C is `ceil(K / 16)`.

    Returns:
        Rows and columns of a block; at least 1 each.
    """
    (rows, columns), (r, c) = data.shape[-2:], scale_inv.shape[-2:]
    if scale_inv.dtype == torch.uint8:
        return 1, MX_BLOCK
    if scale_inv.dtype != torch.float32:
        return 1 if r == rows else NVFP4_BLOCK, NVFP4_BLOCK
    whole_rows, whole_columns = max(rows, 1), max(columns, 1)
    return 1 if r == rows else whole_rows if r == 1 else BLOCK, whole_columns if c == 1 else BLOCK
