"""The memory of a tensor as bytes."""

from __future__ import annotations

import ctypes
import sys

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU, to read and to write; it lasts as long as the tensor.

    NumPy would give the same, for some dtypes, and is not needed elsewhere.
    """
    if sys.byteorder != "little":  # pragma: no cover
        raise RuntimeError("Expected a little-endian machine, got a big-endian one. Files are little-endian.")
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def is_whole(tensor: torch.Tensor) -> bool:
    """Returns whether the memory of a strided tensor reaches to its last element: it may have been freed or cut."""
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.untyped_storage()
    try:
        return memory.data_ptr() != 0 and (last + 1) * tensor.element_size() <= memory.nbytes()
    except RuntimeError:  # zeros that torch keeps no memory for
        return False
