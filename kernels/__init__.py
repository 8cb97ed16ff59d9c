"""FP8 kernels as pure functions: quantization, scaled matmuls, and the update of scales; and random bits from a key.

On a CPU they run in plain torch, on a GPU in Triton; the dispatcher chooses. Each is one opaque operator
(`torch.ops.scoped_fn.*`) for `torch.func`, `torch.compile` and `torch.export`. Imports nothing else of this library.
"""

if __name__ != "scoped_fn.kernels":
    raise ImportError(
        f"Expected to be imported as 'scoped_fn.kernels', got {__name__!r}. Write: import scoped_fn.kernels"
    )

from scoped_fn.kernels.fp8_layers import encode_weight, fp8_linear, fp8_matmul
from scoped_fn.kernels.fp8_matmul import EXPANSIONS
from scoped_fn.kernels.fused import layer_norm_quantize, rms_norm_quantize, silu_gate_quantize
from scoped_fn.kernels.fusible import FUSIBLE
from scoped_fn.kernels.matmul import scaled_mm
from scoped_fn.kernels.nvfp4 import hadamard_16, quantize_nvfp4
from scoped_fn.kernels.quantize import dequantize, quantize, quantize_blocks, quantize_current, quantize_mx
from scoped_fn.kernels.quantized import Quantized
from scoped_fn.kernels.rules import MatmulRule, Quantizer
from scoped_fn.kernels.scales import update_scales
from scoped_fn.kernels.threefry import fold_keys, random_bits, random_keep
from scoped_fn.kernels.xla_math import xla_erf_inv, xla_log, xla_log1p

__all__ = [
    "EXPANSIONS",
    "FUSIBLE",
    "MatmulRule",
    "Quantized",
    "Quantizer",
    "dequantize",
    "encode_weight",
    "fold_keys",
    "fp8_linear",
    "fp8_matmul",
    "hadamard_16",
    "layer_norm_quantize",
    "quantize",
    "quantize_blocks",
    "quantize_current",
    "quantize_mx",
    "quantize_nvfp4",
    "random_bits",
    "random_keep",
    "rms_norm_quantize",
    "scaled_mm",
    "silu_gate_quantize",
    "update_scales",
    "xla_erf_inv",
    "xla_log",
    "xla_log1p",
]
