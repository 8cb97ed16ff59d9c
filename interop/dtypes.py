"""Which dtype of torch is which dtype of JAX, and tensors as NumPy arrays of the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np

# Both libraries call them the same, with the same bits.
SHARED = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
)  # fmt: skip
# What NumPy itself has no name for crosses as integers of the same width.
WITHOUT_NUMPY = frozenset(name for name in SHARED if name == "bfloat16" or name.startswith("float8"))
WIDE = frozenset({"int64", "uint64", "float64", "complex128"})


def name_of(dtype: Any) -> str:
    """Returns the name that both libraries use.

    Raises:
        TypeError: Only one of them has the dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in SHARED:
        raise TypeError(
            f"Expected a dtype that torch and JAX share, got {dtype}. Convert to one of: {', '.join(SHARED)}."
        )
    return name


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns NumPy's dtype of that name; those of JAX's `ml_dtypes` too."""
    import jax.numpy as jnp

    return jnp.dtype(name)


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns an array that shares the memory of a detached tensor without negative or conjugate bit."""
    name = name_of(tensor.dtype)
    if name not in WITHOUT_NUMPY:
        return tensor.numpy()
    return tensor.view(_raw(tensor.dtype.itemsize)).numpy().view(numpy_dtype(name))


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Returns a tensor that shares the memory of a writable array."""
    name = name_of(array.dtype)
    if name not in WITHOUT_NUMPY:
        return torch.from_numpy(array)
    dtype: torch.dtype = getattr(torch, name)
    return torch.from_numpy(array.view(f"i{array.dtype.itemsize}")).view(dtype)


def _raw(size: int) -> torch.dtype:
    return torch.int8 if size == 1 else torch.int16
