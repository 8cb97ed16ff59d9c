"""A call of each operator, with small tensors of ragged sizes and a batch of two."""

from dataclasses import dataclass
from typing import Any

import torch

from scoped_fn.kernels import MatmulRule, Quantizer  # importing it defines the operators

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = (E4M3, E5M2)


@dataclass(frozen=True)
class Call:
    """An operator and its arguments."""

    name: str
    arguments: tuple[Any, ...]

    @property
    def op(self) -> Any:
        return getattr(torch.ops.scoped_fn, self.name).default

    def __str__(self) -> str:
        return self.name + "".join(f"-{a}" for a in self.arguments if isinstance(a, bool))

    def run(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results, with the arguments that are tensors replaced."""
        rest = iter(tensors)
        arguments = (next(rest) if isinstance(a, torch.Tensor) else a for a in self.arguments)
        results = self.op(*arguments)
        return results if isinstance(results, tuple) else (results,)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(a for a in self.arguments if isinstance(a, torch.Tensor))


def rule(kind: str, **options: Any) -> str:
    """A rule of one kind for all three tensors, with gradients in E5M2."""
    forward = Quantizer(kind)
    return str(MatmulRule(forward, forward, Quantizer(kind, E5M2), (True, False, False), **options))


def calls(batch: int = 2) -> list[Call]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator).to(dtype)

    def positive(*shape: int) -> torch.Tensor:
        return torch.rand(batch, *shape, generator=generator) + 0.5

    x = normal(5, 150)
    codes_a, codes_b = normal(5, 150).mul(9).to(E4M3), normal(3, 150).mul(9).to(E5M2)
    exponents = torch.randint(120, 134, (batch, 5, 5), generator=generator).to(torch.uint8)
    scales, no_codes = (positive(), positive(), positive()), (None,) * 4
    left, right, bias, dy = normal(2, 5, 40), normal(2, 3, 40), normal(3), normal(2, 5, 3)
    delayed, current, mx = rule("delayed"), rule("current"), rule("mx")
    codes = (normal(2, 3, 40).to(E4M3), positive(2, 1, 1), None, None)
    products = [
        Call("fp8_matmul", (left, right, bias, *scales, positive(), *no_codes, delayed)),
        Call("fp8_matmul", (left[:, :1], right[:, :1], None, None, None, None, positive(), *no_codes, mx)),
        Call("fp8_matmul", (left, right, None, *scales, positive(), *codes, delayed)),
        Call(
            "fp8_matmul",
            (left, right, bias, None, None, None, positive(), *no_codes, rule("current", calibrating=True)),
        ),
        Call("fp8_matmul_backward", (dy, left, right, *scales, *no_codes, True, True, delayed)),
        Call("fp8_matmul_backward", (dy, left, right, None, None, None, *no_codes, False, True, current)),
        Call(
            "fp8_matmul_backward",
            (dy, left, right, None, None, None, *no_codes, True, False, rule("mx", backward="dequantized")),
        ),
        Call("fake_quantize", (left, positive(), str(Quantizer("delayed", E5M2)))),
    ]
    return [
        *products,
        Call("quantize", (x, positive(1), E4M3, True)),
        Call("quantize", (normal(5, 7, dtype=torch.bfloat16), positive(5), E5M2, False)),
        Call("quantize", (x[:, :1], positive(1), E4M3, True)),
        Call("quantize_current", (x, E4M3, True, 0.0, True)),
        Call("quantize_current", (x, E5M2, False, 1.0, False)),
        Call("quantize_blocks", (x, E4M3, 1, True, 0.0, True)),
        Call("quantize_blocks", (x, E4M3, 128, False, 0.0, True)),
        Call("quantize_blocks", (x, E5M2, 1, False, 0.0, False)),
        Call("quantize_blocks", (x[:, :, :1], E4M3, 128, False, 0.0, True)),
        Call("quantize_mx", (x, E4M3, True)),
        Call("quantize_nvfp4", (x, 16, None, True)),
        Call("quantize_nvfp4", (x, 1, torch.rand(batch, 5, 150, generator=generator), True)),
        Call("update_scales", (positive(4, 6), positive(6), torch.full((batch, 6), 448.0), False, 1.0)),
        Call("update_scales", (positive(4, 6), positive(6), torch.full((batch, 6), 448.0), True, 0.0)),
        Call("rms_norm_quantize", (x, positive(150), positive(), 1e-6, E4M3, True)),
        Call("layer_norm_quantize", (x, positive(150), normal(150), positive(), 1e-5, E4M3, False)),
        Call("silu_gate_quantize", (x, normal(5, 150), positive(), E4M3, True)),
        Call("dequantize", (codes_a, positive(1, 1), torch.bfloat16)),
        Call("dequantize", (codes_a, positive(5, 2), torch.float32)),
        Call("dequantize", (codes_a, exponents, torch.float32)),
        Call("dequantize_nvfp4", (exponents % 16, positive(5, 1).to(E4M3), positive(), torch.float32)),
        Call("scaled_mm", (codes_a, codes_b, positive(1, 1), positive(3, 1), None, torch.float32, True)),
        Call("scaled_mm", (codes_a, codes_b, positive(5, 2), positive(1, 2), normal(3), torch.float16, False)),
    ]
