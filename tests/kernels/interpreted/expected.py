"""What the kernels must give where the reference does not say it: in float64, or step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from scoped_fn.kernels._reference import quantize

Outputs = tuple[Tensor, ...]


def one_over(x: Tensor) -> Tensor:
    return torch.div(torch.ones_like(x), x)


def turned(data: Tensor, transpose: bool) -> Tensor:
    return data.mT.contiguous() if transpose else data.new_empty(data.shape[0], 0, 0)


def spread(per_block: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """One number for each element, from one for each block."""
    return per_block.repeat_interleave(rows, 1).repeat_interleave(columns, 2)[:, : shape[1], : shape[2]]


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The product in float64, from one scale for each element; and the sum of the magnitudes of its terms."""
    a, b = a.double() * scale_a.double(), b.double() * scale_b.double()
    y, size = a @ b.mT, a.abs() @ b.abs().mT
    if bias is None:
        return y, size
    return y + bias.double()[:, None, :], size + bias.double().abs()[:, None, :]


def rms_norm_quantize(
    x: Tensor, weight: Tensor, scale: Tensor, eps: float, dtype: torch.dtype, transpose: bool
) -> Outputs:
    x = x.double()
    rstd = 1.0 / (x.square().mean(-1) + eps).sqrt()
    y = (x * rstd[:, :, None] * weight.double()[:, None, :]).float()
    return *quantize(y, scale[:, None], dtype, transpose), rstd.float()


def layer_norm_quantize(
    x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, eps: float, dtype: torch.dtype, transpose: bool
) -> Outputs:
    x = x.double()
    mean = x.mean(-1)
    rstd = 1.0 / ((x - mean[:, :, None]).square().mean(-1) + eps).sqrt()
    y = (x - mean[:, :, None]) * rstd[:, :, None] * weight.double()[:, None, :] + bias.double()[:, None, :]
    return *quantize(y.float(), scale[:, None], dtype, transpose), mean.float(), rstd.float()


def silu_gate_quantize(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype, transpose: bool) -> Outputs:
    # In float32: below -88.7 the gate is a zero, which a huge `up` would tell from what float64 has there.
    y = torch.nn.functional.silu(gate.float()) * up.float()
    return quantize(y, scale[:, None], dtype, transpose)
