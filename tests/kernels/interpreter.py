"""Makes Triton's interpreter round as a GPU does. For tests only, in a process of its own with TRITON_INTERPRET=1.

In every release from 3.6 to 3.9 the interpreter's casts are wrong for FP8 and bfloat16 (ties go up, nothing saturates,
NaN is lost, float32 to bfloat16 truncates), its products of such operands with them, and its maximum of a NaN and a
number is NaN where a GPU gives the number. What is replaced here is the same in all of these releases.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

FP8_MAX = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
TORCH_DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
Convert = Callable[[np.ndarray, Any, Any, Any], np.ndarray]


def install() -> None:
    """Repairs the interpreter of this process."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "Expected TRITON_INTERPRET=1, set before triton is imported."
    interpreter._convert_float = converter(hopper=True)
    builder = interpreter.InterpreterBuilder
    builder.create_dot = dot
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    interpreter.ReduceOps.apply_impl = reducer(interpreter.ReduceOps.apply_impl)
    interpreter._patch_lang_tensor = with_index(interpreter._patch_lang_tensor)
    interpreter._implicit_cvt = with_floats(interpreter._implicit_cvt)
    # Kernels overflow and make NaN on purpose.
    np.seterr(all="ignore")


@contextmanager
def poor_casts() -> Iterator[None]:
    """Casts at their worst: through float16, which rounds twice, and numbers beyond the largest become NaN or inf."""
    before = interpreter._convert_float
    interpreter._convert_float = converter(hopper=False)
    yield
    interpreter._convert_float = before


def converter(*, hopper: bool) -> Convert:
    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        assert rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE), "only round to nearest even is repaired"
        x = as_torch(data, source.name)
        if target.name in FP8_MAX:
            x = saturated(x.float(), target.name) if hopper else overflown(x.half().float(), target.name)
        x = x.to(TORCH_DTYPES[target.name])
        bits = x.view(torch.uint8).numpy().view(f"uint{target.primitive_bitwidth}")
        return bits.reshape(data.shape).copy()

    return convert


def saturated(x: torch.Tensor, name: str) -> torch.Tensor:
    """float32 numbers that torch's cast only rounds, whatever its release does with those that are too large."""
    limit = FP8_MAX[name]
    return torch.where(x.isnan(), x, x.clamp(-limit, limit))


def overflown(x: torch.Tensor, name: str) -> torch.Tensor:
    # A tie goes to the even one of its neighbors: to 448 in e4m3 (mantissa 6), past the largest in e5m2 (mantissa 3).
    if name == "fp8e4nv":
        return torch.where(x.abs() > 464.0, torch.nan, saturated(x, name))
    return torch.where(x.abs() >= 61440.0, torch.inf * x.sign(), saturated(x, name))


def as_torch(data: np.ndarray, name: str) -> torch.Tensor:
    flat = np.array(data, copy=True, order="C").reshape(-1)
    return torch.from_numpy(flat.view(np.uint8)).view(TORCH_DTYPES[name])


def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Products in float32, exact for FP8 and 16-bit operands but for the order of the additions."""
    assert d.dtype.scalar == tl.float32
    product = operand(a) @ operand(b)
    return interpreter.TensorHandle((product + d.data).astype(np.float32), tl.float32)


def operand(handle: Any) -> np.ndarray:
    return as_torch(handle.data, handle.dtype.scalar.name).float().numpy().reshape(handle.data.shape)


def reducer(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A maximum that ignores NaN without a warning where there is nothing else."""

    def apply_impl(self: Any, tensors: Any) -> Any:
        if self.combine_fn != tl.standard._elementwise_max:
            return original(self, tensors)
        (tensor,) = tensors
        largest = np.fmax.reduce(tensor.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(largest, tensor.dtype)

    return apply_impl


def with_index(original: Callable[..., None]) -> Callable[..., None]:
    """Loop bounds, which 3.6 gets from arrays of one element in a way that numpy 2.4 refuses."""

    def patch(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)

        def index(self: Any) -> int:
            return int(self.handle.data.squeeze())

        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    return patch


def with_floats(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Python floats as float32 arguments, which they are on a GPU."""

    def convert(argument: Any) -> Any:
        if not isinstance(argument, float):
            return original(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)

    return convert
