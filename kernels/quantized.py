"""Quantized matrices: FP8 codes and the scales that belong to them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from scoped_fn.kernels._formats import as_rows


class Quantized(NamedTuple):
    """A matrix x (M, K) in low precision: ``x ~ data * scale_inv`` (for NVFP4 with one more scale: `dequantize`).

    A named tuple, so a pytree for torch, optree and JAX. The shape of `scale_inv` tells what shares a scale:

    | shape | dtype | one scale for |
    |---|---|---|
    | `()` | float32 | the tensor |
    | `(M, 1)` | float32 | each row |
    | `(M, ceil(K / 128))` | float32 | 1 x 128 elements |
    | `(ceil(M / 128), ceil(K / 128))` | float32 | 128 x 128 elements |
    | `(M, ceil(K / 32))` | uint8, E8M0: `2 ** (byte - 127)` | 1 x 32 elements |
    | `(M, ceil(K / 16))` or `(ceil(M / 16), ceil(K / 16))` | float8_e4m3fn | 1 x 16 or 16 x 16 elements |

    Attributes:
        data: FP8 codes in the shape of x, (..., K); for NVFP4 E2M1 codes from 0 to 15, one a byte (uint8).
        data_t: The codes of the transposed matrix, (K, M) in rows, or None. Where scales run along rows only
            (1 x 128, 1 x 32, 1 x 16) it is quantized on its own, from the same x.
        amax: The largest |x|, float32 (), before scaling; NaN is ignored. None for blocks of 128 and 32.
        scale_inv: What the codes are multiplied with to get x.
        scale_inv_t: The scales of data_t, or None.
    """

    data: Tensor
    data_t: Tensor | None
    amax: Tensor | None
    scale_inv: Tensor
    scale_inv_t: Tensor | None

    @property
    def mT(self) -> Quantized:  # noqa: N802 - the name that tensors have
        """The transposed matrix, (K, M). A view: nothing is quantized again."""
        rows = as_rows(self.data)
        columns = rows.mT if self.data_t is None else self.data_t
        scale_inv_t = _transposed(self.scale_inv) if self.scale_inv_t is None else self.scale_inv_t
        return Quantized(columns, rows, self.amax, scale_inv_t, self.scale_inv)


def _transposed(scale_inv: Tensor) -> Tensor:
    return scale_inv.mT if scale_inv.dim() == 2 else scale_inv
