"""What the front doors of this room refuse, and in which words."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from scoped_fn.kernels._formats import BLOCK, E4M3, E5M2, FLOAT32_MAX, FP8_MAX, MX_BLOCK, NVFP4_BLOCK, as_rows, ceil_div
from scoped_fn.kernels.quantized import Quantized

# Data and scales that belong together: rows and columns of a block, and the size of scales where one spans them all.
SCALED: Final = MappingProxyType(
    {
        (E4M3, torch.float32): (BLOCK, BLOCK, (1,)),
        (E5M2, torch.float32): (BLOCK, BLOCK, (1,)),
        (E4M3, torch.uint8): (1, MX_BLOCK, ()),
        (E5M2, torch.uint8): (1, MX_BLOCK, ()),
        (torch.uint8, E4M3): (NVFP4_BLOCK, NVFP4_BLOCK, ()),
    }
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def as_matrix(x: Tensor, name: str = "x") -> Tensor:
    """Returns x (..., K) as a batch of one matrix, (1, M, K).

    Raises:
        TypeError: x is not a float32, bfloat16 or float16 tensor.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"Expected {name} to be a tensor, got {type(x).__name__}. Pass a torch.Tensor.")
    if x.dtype not in FLOATS:
        raise TypeError(
            f"Expected {name} in float32, bfloat16 or float16, got {x.dtype}. Convert it: {name}.to(torch.float32)."
        )
    return as_rows(x)[None]


def check_fp8(dtype: torch.dtype) -> None:
    """Raises TypeError for a dtype that is not one of the two FP8 formats."""
    if dtype not in FP8_MAX:
        raise TypeError(
            f"Expected dtype to be torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}. Choose one of the two."
        )


def check_float32(value: Tensor, name: str, *shapes: tuple[int, ...]) -> None:
    """Raises TypeError or ValueError for what is not a float32 tensor of one of the shapes."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"Expected {name} to be a float32 tensor, got {got}. Pass torch.tensor(..., torch.float32).")
    if tuple(value.shape) not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"Expected {name} of shape {wanted}, got {tuple(value.shape)}. Reshape it.")


def check_vector(value: Tensor, name: str, size: int) -> None:
    """Raises TypeError or ValueError for what is not a tensor of one size in a float dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"Expected {name} to be a tensor, got {type(value).__name__}. Pass a torch.Tensor.")
    if value.dtype not in FLOATS or tuple(value.shape) != (size,):
        raise ValueError(
            f"Expected {name} of shape ({size},) in float32, bfloat16 or float16, got {tuple(value.shape)} in "
            f"{value.dtype}. Reshape or convert it."
        )


def check_quantized(value: Quantized, name: str) -> None:
    """Raises TypeError for what is not `Quantized`, ValueError where its parts lie on several devices."""
    if not isinstance(value, Quantized):
        raise TypeError(
            f"Expected {name} to be Quantized, got {type(value).__name__}. Quantize it: {name} = quantize(...)."
        )
    for part in (value.data, value.scale_inv):
        if not isinstance(part, Tensor):
            raise TypeError(
                f"Expected data and scale_inv of {name} to be tensors, got {type(part).__name__}. Quantize it."
            )
    check_same_device(value.data, **{f"scale_inv of {name}": value.scale_inv, f"amax of {name}": value.amax})


def check_same_device(first: Tensor, **others: Tensor | None) -> None:
    """Raises ValueError for tensors on several devices."""
    for name, other in others.items():
        if other is not None and other.device != first.device:
            raise ValueError(f"Expected {name} on {first.device}, got {other.device}. Move it: .to({first.device}).")


def check_choice(value: object, name: str, choices: tuple[object, ...]) -> None:
    """Raises ValueError for a value that is not one of the choices."""
    if value not in choices:
        wanted = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"Expected {name} to be {wanted}, got {value!r}. Choose one of them.")


def check_not_negative(value: float, name: str) -> None:
    """Raises TypeError or ValueError for what is not a number from zero to the largest float32."""
    check_number(value, name)
    if not 0 <= value <= FLOAT32_MAX:
        raise ValueError(f"Expected {name} of at least 0, got {value}. Pass 0 for no effect.")


def check_number(value: float, name: str) -> None:
    """Raises TypeError for what is not a Python number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"Expected {name} to be a number, got {type(value).__name__}. Pass a Python float.")


def check_layout(data: Tensor, scale_inv: Tensor, name: str) -> Tensor:
    """Returns the scales of quantized data (M, K) as (R, C).

    Raises:
        TypeError: The data or the scales have another dtype.
        ValueError: The scales do not fit the data, or do not run along its rows.
    """
    if (data.dtype, scale_inv.dtype) not in SCALED:
        raise TypeError(
            f"Expected {name} of FP8 data with float32 or E8M0 (uint8) scales, or E2M1 codes (uint8) with E4M3 ones, "
            f"got {data.dtype} with {scale_inv.dtype}. Make it with quantize, or another function of this module."
        )
    rows, columns = data.shape
    if scale_inv.dim() not in (0, 2):
        raise ValueError(
            f"Expected scales of {name} of shape () or (R, C), got {tuple(scale_inv.shape)}. Rows have (M, 1)."
        )
    scales = scale_inv if scale_inv.dim() == 2 else scale_inv.reshape(1, 1)
    block_rows, block_columns, whole = SCALED[data.dtype, scale_inv.dtype]
    # What spans a dimension first: a comparison with its size would tie a traced size down.
    r_fits = scales.shape[0] in (*whole, rows, ceil_div(rows, block_rows))
    if not (r_fits and scales.shape[1] in (*whole, ceil_div(columns, block_columns))):
        raise ValueError(
            f"Expected scales along the rows of {name}, whose data is {(rows, columns)}, got scales of shape "
            f"{tuple(scale_inv.shape)}. Quantize with transpose=True to multiply along the other dimension."
        )
    return scales
