"""The operators, registered as `torch.ops.scoped_fn.*`: the reference on a CPU, Triton on a GPU, shapes for tracing.

Each tensor leads with a batch dimension (B), which is 1 but under vmap. `kernels/_reference.py` says what they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from scoped_fn.kernels import _reference as reference
from scoped_fn.kernels._derivatives import DEQUANTIZE, SCALED_MM
from scoped_fn.kernels._formats import BLOCK, E4M3, MX_BLOCK, NVFP4_BLOCK, ceil_div
from scoped_fn.kernels._opaque_op import Derivative, define_op

LIBRARY = torch.library.Library("scoped_fn", "FRAGMENT")  # type: ignore[no-untyped-call]


def _triton(file: str, name: str) -> Callable[..., Any]:
    def launch(*arguments: Any) -> Any:
        # Imported at the first launch: Triton takes a second to import, and not every machine has it.
        launcher = getattr(import_module(f"scoped_fn.kernels.gpu.{file}"), name)
        device = arguments[0].device
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
            found = torch.cuda.get_device_name(device)
            raise RuntimeError(f"Expected a GPU with FP8, of compute capability 8.9 or more, got {found}. Use a CPU.")
        with torch.cuda.device(device):
            return launcher(*arguments)

    return launch


def _define(file: str | None, schema: str, fake: Callable[..., Any], derivative: Derivative | None = None) -> Any:
    name = schema.split("(")[0]
    return define_op(
        LIBRARY,
        schema,
        cpu=getattr(reference, name),
        cuda=getattr(reference, name) if file is None else _triton(file, name),
        fake=fake,
        derivative=derivative,
    )


def _data(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _data_t(x: Tensor, dtype: torch.dtype, transpose: bool) -> Tensor:
    batch, rows, columns = x.shape
    return x.new_empty((batch, columns, rows) if transpose else (batch, 0, 0), dtype=dtype)


def _number(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:1], dtype=torch.float32)


def _of_rows(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:2], dtype=torch.float32)


quantize = _define(
    "quantize",
    "quantize(Tensor x, Tensor scale, ScalarType dtype, bool transpose) -> (Tensor, Tensor, Tensor)",
    lambda x, scale, dtype, transpose: (_data(x, dtype), _data_t(x, dtype, transpose), _number(x)),
)
quantize_current = _define(
    "quantize",
    "quantize_current(Tensor x, ScalarType dtype, bool power_of_2, float epsilon, bool transpose)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, dtype, _, __, transpose: (_data(x, dtype), _data_t(x, dtype, transpose), _number(x), _number(x)),
)


def _fake_blocks(
    x: Tensor, dtype: torch.dtype, block_rows: int, power_of_2: bool, epsilon: float, transpose: bool
) -> tuple[Tensor, ...]:
    batch, rows, columns = x.shape
    scale_inv = (batch, ceil_div(columns, BLOCK), ceil_div(rows, block_rows))
    scale_inv_t = (batch, ceil_div(rows, BLOCK), columns) if transpose and block_rows == 1 else (batch, 0, 0)
    new = x.new_empty
    scales = new(scale_inv, dtype=torch.float32), new(scale_inv_t, dtype=torch.float32)
    return _data(x, dtype), scales[0], _data_t(x, dtype, transpose), scales[1]


quantize_blocks = _define(
    "blocks",
    "quantize_blocks(Tensor x, ScalarType dtype, int block_rows, bool power_of_2, float epsilon, bool transpose)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_blocks,
)


def _fake_mx(x: Tensor, dtype: torch.dtype, transpose: bool) -> tuple[Tensor, ...]:
    batch, rows, columns = x.shape
    exponent = x.new_empty(batch, rows, ceil_div(columns, MX_BLOCK), dtype=torch.uint8)
    shape_t = (batch, columns, ceil_div(rows, MX_BLOCK)) if transpose else (batch, 0, 0)
    return _data(x, dtype), exponent, _data_t(x, dtype, transpose), x.new_empty(shape_t, dtype=torch.uint8)


quantize_mx = _define(
    "mx",
    "quantize_mx(Tensor x, ScalarType dtype, bool transpose) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_mx,
)
dequantize = _define(
    "dequantize",
    "dequantize(Tensor data, Tensor scale_inv, ScalarType dtype) -> Tensor",
    lambda data, scale_inv, dtype: _data(data, dtype),
    DEQUANTIZE,
)
scaled_mm = _define(
    "matmul",
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, bool fast_accum)"
    " -> Tensor",
    lambda a, b, _, __, ___, out_dtype, ____: a.new_empty((*a.shape[:2], b.shape[1]), dtype=out_dtype),
    SCALED_MM,
)
update_scales = _define(
    "scales",
    "update_scales(Tensor amax_history, Tensor scale, Tensor fp8_max, bool most_recent, float margin)"
    " -> (Tensor, Tensor)",
    lambda history, scale, *_: (history.new_empty(history.shape), scale.new_empty(scale.shape)),
)
rms_norm_quantize = _define(
    "norms",
    "rms_norm_quantize(Tensor x, Tensor weight, Tensor scale, float eps, ScalarType dtype, bool transpose)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, _, __, ___, dtype, transpose: (_data(x, dtype), _data_t(x, dtype, transpose), _number(x), _of_rows(x)),
)
layer_norm_quantize = _define(
    "norms",
    "layer_norm_quantize(Tensor x, Tensor weight, Tensor bias, Tensor scale, float eps, ScalarType dtype,"
    " bool transpose) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda x, _, __, ___, ____, dtype, transpose: (
        _data(x, dtype),
        _data_t(x, dtype, transpose),
        _number(x),
        _of_rows(x),
        _of_rows(x),
    ),
)
silu_gate_quantize = _define(
    "gate",
    "silu_gate_quantize(Tensor gate, Tensor up, Tensor scale, ScalarType dtype, bool transpose)"
    " -> (Tensor, Tensor, Tensor)",
    lambda gate, _, __, dtype, transpose: (_data(gate, dtype), _data_t(gate, dtype, transpose), _number(gate)),
)


def _fake_nvfp4(x: Tensor, block_rows: int, noise: Tensor | None, transpose: bool) -> tuple[Tensor, ...]:
    batch, m, k = x.shape
    scales = (batch, ceil_div(m, block_rows), ceil_div(k, NVFP4_BLOCK))
    scales_t = (batch, ceil_div(k, block_rows), ceil_div(m, NVFP4_BLOCK)) if transpose else (batch, 0, 0)
    scale_inv, scale_inv_t = (x.new_empty(shape, dtype=E4M3) for shape in (scales, scales_t))
    return _data(x, torch.uint8), scale_inv, _data_t(x, torch.uint8, transpose), scale_inv_t, _number(x)


quantize_nvfp4 = _define(
    None,
    "quantize_nvfp4(Tensor x, int block_rows, Tensor? noise, bool transpose)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_nvfp4,
)
dequantize_nvfp4 = _define(
    None,
    "dequantize_nvfp4(Tensor data, Tensor scale_inv, Tensor amax, ScalarType dtype) -> Tensor",
    lambda data, _, __, dtype: _data(data, dtype),
)
