"""Logarithms and the inverse error function of float32 as XLA computes them on a CPU, bit for bit, as one operator.

`jax.random` makes normal, exponential and Gumbel numbers of uniform ones by these functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

import torch
from torch import Tensor

from scoped_fn.kernels import _xla_math as reference
from scoped_fn.kernels._opaque_op import define_op
from scoped_fn.kernels._ops import LIBRARY

FUNCTIONS: Final = (reference.log, reference.log1p, reference.erf_inv)
LOG, LOG1P, ERF_INV = range(3)


def _on_cpu(x: Tensor, function: int) -> Tensor:
    # Imported at the first call, which compiles it once for a machine.
    return import_module("scoped_fn.kernels.xla_math_cpu").xla_math(x, function)  # type: ignore[no-any-return]


_math = define_op(
    LIBRARY,
    "xla_math(Tensor x, int function) -> Tensor",
    cpu=_on_cpu,
    cuda=lambda x, function: FUNCTIONS[function](x),
    fake=lambda x, function: torch.empty_like(x, memory_format=torch.contiguous_format),
    derivative=None,
)


def xla_log(x: Tensor) -> Tensor:
    """Returns the natural logarithm.

    Args:
        x: float32 of any shape: 0, whose logarithm is -inf, or positive normal numbers.

    Returns:
        float32, of that shape. There is no derivative.
    """
    return _computed(x, LOG)


def xla_log1p(x: Tensor) -> Tensor:
    """Returns log(1 + x).

    Args:
        x: float32 of any shape, from -1 to 0.

    Returns:
        float32, of that shape. There is no derivative.
    """
    return _computed(x, LOG1P)


def xla_erf_inv(x: Tensor) -> Tensor:
    """Returns the inverse error function.

    Args:
        x: float32 of any shape, between -1 and 1.

    Returns:
        float32, of that shape. There is no derivative.
    """
    return _computed(x, ERF_INV)


def _computed(x: Tensor, function: int) -> Tensor:
    if x.dtype != torch.float32:
        raise ValueError(f"Expected float32 numbers, got {x.dtype}. Convert them, or use torch's function.")
    if x.device.type != "cpu":  # plain operations, which Inductor fuses
        return FUNCTIONS[function](x)
    return _math(x[None], function)[0]  # type: ignore[no-any-return]
