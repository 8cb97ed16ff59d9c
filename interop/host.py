"""The code that XLA calls: a function of tensors, run on XLA's own buffers, without a call of JAX.

JAX must not be called here: the thread that runs this may be the one that JAX would wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scoped_fn.interop.dtypes import WITHOUT_NUMPY
from scoped_fn.interop.torch_call import Spec, TorchCall


def callback_of(call: TorchCall) -> Callable[..., None]:
    """Returns the function `(context, output buffers, *input buffers)` that runs a call."""
    reads = [_read_of(spec) for spec in call.inputs]
    writes = [_write_of(spec) for spec in call.outputs]

    def run_on_buffers(_: Any, outputs: Any, *inputs: Any) -> None:
        with torch.no_grad():
            tensors = [read(buffer) for read, buffer in zip(reads, inputs, strict=True)]
            results = call.run([tensor.clone() for tensor in tensors] if call.owned else tensors)
            for write, result, buffer in zip(writes, results, outputs, strict=True):
                write(result, buffer)

    return run_on_buffers


def _view_of(name: str) -> Callable[[Any], torch.Tensor]:
    """Returns what makes a tensor of a buffer's memory."""
    import numpy as np

    dtype: torch.dtype = getattr(torch, name)
    if name not in WITHOUT_NUMPY:
        return lambda buffer: torch.from_numpy(np.asarray(buffer))
    raw = f"i{dtype.itemsize}"
    return lambda buffer: torch.from_numpy(np.asarray(buffer).view(raw)).view(dtype)


def _read_of(spec: Spec) -> Callable[[Any], torch.Tensor]:
    view, dtype = _view_of(spec.array_dtype), getattr(torch, spec.dtype)
    return view if spec.dtype == spec.array_dtype else lambda buffer: view(buffer).to(dtype)


def _write_of(spec: Spec) -> Callable[[torch.Tensor, Any], None]:
    """Returns what copies a result into a buffer, if it is what the specification says."""
    view = _view_of(spec.array_dtype)
    shape, dtype = torch.Size(spec.shape), getattr(torch, spec.dtype)

    def write(result: torch.Tensor, buffer: Any) -> None:
        if result.shape != shape or result.dtype is not dtype:
            raise ValueError(
                f"Expected an output of shape {list(shape)} and dtype {dtype}, as when the function was traced, "
                f"got {list(result.shape)} and {result.dtype}. Make shapes depend on shapes alone."
            )
        if spec.array_dtype != spec.dtype:
            _check_fits(result, spec.array_dtype)
        view(buffer).copy_(result)

    return write


def _check_fits(result: torch.Tensor, array_dtype: str) -> None:
    largest: int = torch.iinfo(getattr(torch, array_dtype)).max
    values = result.view(torch.int64)  # uint64 has no comparisons; what is too large for it is negative here
    least = -largest - 1 if array_dtype == "int32" else 0
    if values.numel() and not least <= int(values.min()) <= int(values.max()) <= largest:
        raise OverflowError(
            f"Expected outputs that fit {array_dtype} while jax_enable_x64 is off, got {int(values.min())} to "
            f"{int(values.max())}. Set jax_enable_x64, or return smaller numbers."
        )
