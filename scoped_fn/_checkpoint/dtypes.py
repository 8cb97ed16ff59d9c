"""Dtypes as a file names them, and the forms in which tensors are stored."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from scoped_fn._checkpoint.unfit import Unfit, refusal

# The names of the safetensors format, for dtypes that its oldest readers know too.
STORED: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.bool: "BOOL",
        torch.uint8: "U8",
        torch.int8: "I8",
        torch.uint16: "U16",
        torch.int16: "I16",
        torch.uint32: "U32",
        torch.int32: "I32",
        torch.uint64: "U64",
        torch.int64: "I64",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float32: "F32",
        torch.float64: "F64",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
    }
)
BY_STORED_NAME = MappingProxyType({name: dtype for dtype, name in STORED.items()})
# Stored as pairs of real and imaginary part, in one dimension more.
COMPLEX = MappingProxyType(
    {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
)
# Stored as the bytes that they are.
AS_BYTES = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
NAMES = MappingProxyType(
    {
        name: value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
    }
)


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def described_tensor(tensor: torch.Tensor) -> str:
    """Returns dtype and shape of a tensor, such as "float32[2, 3]"."""
    return f"{name_of(tensor.dtype)}{list(tensor.shape)}"


def dtype_of(name: object) -> torch.dtype:
    """Returns the dtype of a name; raises `Unfit` if there is none."""
    if not isinstance(name, str) or name not in NAMES:
        raise refusal("the name of a dtype of torch", name)
    return NAMES[name]


def stored_form(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of a dtype in `STORED` that holds the bits of a plain tensor; of no other memory if it can."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype in COMPLEX:
        return torch.view_as_real(plain)
    return plain.view(torch.uint8) if plain.dtype in AS_BYTES else plain


def original_form(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the tensor of a dtype that a stored one holds the bits of; raises `Unfit` if that cannot be."""
    if dtype in AS_BYTES and stored.dtype == torch.uint8:
        return stored.view(dtype)
    pairs = stored.dim() > 0 and stored.shape[-1] == 2
    if dtype not in COMPLEX or stored.dtype != COMPLEX[dtype] or not pairs:
        raise Unfit(f"a tensor that is stored for {name_of(dtype)}", described_tensor(stored))
    return torch.view_as_complex(stored)
