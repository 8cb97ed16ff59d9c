"""The launches that are compiled: each kernel in each form, at shapes that take each entry of the tile table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from scoped_fn.kernels.gpu import blocks, dequantize, gate, matmul, mx, norms, quantize, scales, threefry

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FLOAT32 = torch.bfloat16, torch.float32
# Multiples of every block, and sizes that are multiples of none.
M, K = 4096, 4096
ODD = (1001, 1003)


@dataclass(frozen=True)
class Case:
    """One call of a launcher.

    Attributes:
        name: Names the test.
        module: Holds the launcher and its kernels.
        call: Calls the launcher with tensors that have no memory.
        everywhere: Whether to compile it for every GPU, not for Hopper alone.
        fp8: The format that the kernel casts to, where it does.
        wide: Whether every load and store of a matrix is of 128 bits.
    """

    name: str
    module: ModuleType
    call: Callable[[], object]
    everywhere: bool = False
    fp8: torch.dtype | None = None
    wide: bool = False


def tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def numbers(*shape: int) -> Tensor:
    return tensor(*shape, dtype=FLOAT32)


def quantizers() -> list[Case]:
    x, odd, one = tensor(1, M, K), tensor(2, *ODD), numbers(1, 1)
    # Offsets inside of one tile do not fit 32 bits.
    far = torch.empty_strided((1, M, K), (2**38, 2**26, 1), dtype=BF16, device="meta")
    call = quantize.quantize
    return [
        Case("quantize", quantize, lambda: call(x, one, E4M3, False), True, E4M3, True),
        Case("quantize, transpose", quantize, lambda: call(x, one, E4M3, True), True, E4M3, True),
        Case("quantize, e5m2", quantize, lambda: call(x, one, E5M2, True), False, E5M2, True),
        Case("quantize, float32", quantize, lambda: call(numbers(1, M, K), one, E4M3, True), False, E4M3, True),
        Case("quantize, row scales", quantize, lambda: call(x, numbers(1, M), E4M3, False), False, E4M3, True),
        Case("quantize, x transposed", quantize, lambda: call(x.mT, one, E4M3, True), False, E4M3, True),
        Case("quantize, odd", quantize, lambda: call(odd, numbers(2, 1), E4M3, True), True, E4M3),
        Case("quantize, rows far apart", quantize, lambda: call(far, one, E4M3, True), False, E4M3, True),
        Case("quantize, one element", quantize, lambda: call(tensor(1, 1, 1), one, E4M3, True)),
        Case("current", quantize, lambda: quantize.quantize_current(x, E4M3, False, 1e-9, True), True, E4M3, True),
        Case("current, odd", quantize, lambda: quantize.quantize_current(odd, E5M2, True, 0.0, False), False, E5M2),
    ]


def block_quantizers() -> list[Case]:
    x, odd = tensor(1, M, K), tensor(2, *ODD)

    def call(x: Tensor, rows: int, transpose: bool, power_of_2: bool = False) -> Callable[[], object]:
        return lambda: blocks.quantize_blocks(x, E4M3, rows, power_of_2, 1e-9, transpose)

    return [
        Case("blocks of a row", blocks, call(x, 1, False), True, E4M3, True),
        Case("blocks of a row, transpose", blocks, call(x, 1, True), True, E4M3, True),
        Case("blocks of a row, odd", blocks, call(odd, 1, True, True), False, E4M3),
        Case("blocks of a row, float32", blocks, call(numbers(1, M, K), 1, True), False, E4M3, True),
        Case("blocks of 128", blocks, call(x, 128, False), False, E4M3, True),
        Case("blocks of 128, transpose", blocks, call(x, 128, True), True, E4M3, True),
        Case("blocks of 128, odd", blocks, call(odd, 128, True), False, E4M3),
        Case("mx", mx, lambda: mx.quantize_mx(x, E4M3, False), True, E4M3, True),
        Case("mx, transpose", mx, lambda: mx.quantize_mx(x, E4M3, True), True, E4M3, True),
        Case("mx, odd", mx, lambda: mx.quantize_mx(odd, E5M2, True), False, E5M2),
    ]


def others() -> list[Case]:
    codes, x, one = tensor(1, M, K, dtype=E4M3), tensor(1, M, K), numbers(1)
    by_block, exponents = numbers(1, K // 128, M).mT, tensor(1, M, K // 32, dtype=torch.uint8)
    history, columns = numbers(1, 1024, 400), numbers(1, 400)
    keys = tensor(1, 2, dtype=torch.int32)

    def update(history: Tensor, columns: Tensor) -> Callable[[], object]:
        return lambda: scales.update_scales(history, columns, columns, False, 1.0)

    return [
        Case("dequantize", dequantize, lambda: dequantize.dequantize(codes, numbers(1, 1, 1), BF16), True),
        Case("dequantize, blocks", dequantize, lambda: dequantize.dequantize(codes, by_block, BF16)),
        Case("dequantize, mx", dequantize, lambda: dequantize.dequantize(codes, exponents, FLOAT32)),
        Case("gate", gate, lambda: gate.silu_gate_quantize(x, x, one, E4M3, False), True, E4M3, True),
        Case("gate, transpose", gate, lambda: gate.silu_gate_quantize(x, x, one, E4M3, True), False, E4M3, True),
        Case("random bits", threefry, lambda: threefry.random_bits(keys, [M, K]), True),
        Case("random keep", threefry, lambda: threefry.random_keep(keys, [1001], 2**20), True),
        Case("keys", threefry, lambda: threefry.fold_keys(keys, tensor(1, 1001, dtype=torch.int32)), True),
        Case("update", scales, update(history, columns), True),
        Case("update, one element", scales, update(numbers(1, 1, 1), numbers(1, 1))),
    ]


def norm_cases() -> list[Case]:
    def call(columns: int, center: bool, transpose: bool = False) -> Callable[[], object]:
        x, row, one = tensor(1, M, columns), tensor(1, columns), numbers(1)
        if center:
            return lambda: norms.layer_norm_quantize(x, row, row, one, 1e-5, E4M3, transpose)
        return lambda: norms.rms_norm_quantize(x, row, one, 1e-5, E4M3, transpose)

    return [
        *(Case(f"layer norm of {k}", norms, call(k, True), False, E4M3, True) for k in (128, 256, 512, 1024, 2048)),
        Case("layer norm of 4096", norms, call(4096, True), True, E4M3, True),
        Case("layer norm of 8192", norms, call(8192, True), False, E4M3, True),
        Case("layer norm of 16384", norms, call(16384, True), False, E4M3, True),
        Case("layer norm of 8001", norms, call(8001, True), False, E4M3),
        Case("layer norm, transpose", norms, call(4096, True, True), True, E4M3, True),
        Case("rms norm of 8192", norms, call(8192, False), False, E4M3, True),
        Case("rms norm, transpose", norms, call(4096, False, True), False, E4M3, True),
    ]


def products() -> list[Case]:
    def call(m: int, k: int, sums: str, batch: int = 1, out: torch.dtype = BF16, n: int = 4096) -> Callable[[], object]:
        a, b, bias = tensor(batch, m, k, dtype=E4M3), tensor(batch, n, k, dtype=E4M3), tensor(batch, n)
        scale_a, scale_b = {
            "fast": (numbers(batch, 1, 1), numbers(batch, 1, 1)),
            "split": (numbers(batch, m, 1), numbers(batch, n, 1)),
            "squares": (numbers(batch, -(-k // 128), m).mT, numbers(batch, -(-k // 128), -(-n // 128)).mT),
            "blocks": (numbers(batch, -(-k // 128), m).mT, numbers(batch, -(-k // 128), n).mT),
        }[sums]
        return lambda: matmul.scaled_mm(a, b, scale_a, scale_b, bias, out, sums == "fast")

    def row_scales() -> object:
        a, b, scale = tensor(1, 8192, K, dtype=E4M3), tensor(1, M, K, dtype=E5M2), numbers(1, 1, 1)
        return matmul.scaled_mm(a, b, numbers(1, 8192, 1), scale.expand(1, M, 1), None, FLOAT32, True)

    return [
        Case("product, fast, tma", matmul, call(8192, K, "fast"), True),
        Case("product, fast, tma, float32", matmul, call(8192, K, "fast", out=FLOAT32)),
        Case("product, fast, tma, row scales, e4m3 x e5m2", matmul, row_scales, True),
        Case("product, fast, tma, medium", matmul, call(1024, K, "fast"), True),
        Case("product, fast, tma, low", matmul, call(64, K, "fast"), True),
        Case("product, split, tma", matmul, call(8192, K, "split"), True),
        Case("product, split, tma, float32", matmul, call(8192, K, "split", out=FLOAT32)),
        Case("product, split, tma, low", matmul, call(64, K, "split")),
        Case("product, squares, tma", matmul, call(8192, K, "squares"), True),
        Case("product, blocks, tma", matmul, call(8192, 1008, "blocks", out=FLOAT32), True),
        Case("product, squares, tma, low", matmul, call(64, K, "squares")),
        Case("product, fast, batch", matmul, call(1024, K, "fast", 2)),
        Case("product, fast, batch, low", matmul, call(64, K, "fast", 2)),
        Case("product, split, batch", matmul, call(1024, K, "split", 2)),
        Case("product, split, batch, low", matmul, call(64, K, "split", 2)),
        Case("product, squares, batch", matmul, call(1024, K, "squares", 2)),
        Case("product, squares, batch, low", matmul, call(64, K, "squares", 2), True),
        Case("product, fast, odd", matmul, call(1001, 1003, "fast", n=1005)),
        Case("product, split, odd", matmul, call(1001, 1003, "split", out=FLOAT32, n=1005)),
        Case("product, blocks, odd", matmul, call(1001, 1003, "blocks", 2, FLOAT32, n=1005), True),
        Case("product, one element", matmul, call(1, 1, "split", n=1)),
    ]


CASES = [*quantizers(), *block_quantizers(), *others(), *norm_cases(), *products()]
