"""``python -m tests.bench.gpu``: checks every FP8 kernel on one GPU, then times it. Under 5 minutes.

First each kernel against the CPU reference at three shapes: bit for bit, products within a bound. Then the table of
docs/kernels.md, with the ratio to a copy on the device, to `torch._scaled_mm` and to a bfloat16 matmul. Exits with 1 if
a result is wrong, and with 2 without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from scoped_fn.tune_cases import Case, cases

SHAPES = ((256, 512), (300, 200), (1, 4097))
E4M3 = torch.float8_e4m3fn
# Terabytes a second, or teraflops: the targets of docs/kernels.md.
TARGETS = {
    ("quantize", "", "8192 x 8192"): 3.6,
    ("quantize", "transpose", "8192 x 8192"): 3.2,
    ("quantize", "current", "8192 x 8192"): 3.4,
    ("quantize_blocks", "1", "8192 x 8192"): 3.0,
    ("quantize_blocks", "1 transpose", "8192 x 8192"): 3.0,
    ("quantize_blocks", "128 transpose", "8192 x 8192"): 3.0,
    ("scaled_mm", "fast tma", "8192 x 8192"): 1300.0,
}
LINE = "{:<34} {:>13} {:>9} {:>16} {:>7}  {:<16} {:>6}"


def main() -> int:
    if not torch.cuda.is_available():
        print("Expected a GPU that torch can use, got none. This benchmark needs one.", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    wrong = [complaint for rows, columns in SHAPES for complaint in complaints(rows, columns)]
    for complaint in wrong:
        print(complaint)
    print(f"{len(wrong)} wrong results\n", flush=True)
    print_times()
    return 1 if wrong else 0


def calls(rows: int, columns: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields each operator and its arguments, on the CPU."""
    x = torch.randn(2, rows, columns) * 20
    x[:, :, 0], bf16, ones = 0.0, x.bfloat16(), torch.ones(2)
    a, b = x.to(E4M3), torch.randn(2, 96, columns).to(torch.float8_e5m2)
    groups = -(-columns // 128)
    for transpose in (False, True):
        yield "quantize", (bf16, torch.full((2, 1), 3.7), E4M3, transpose)
        yield "quantize_current", (x, torch.float8_e5m2, transpose, 0.0, transpose)
        yield "quantize_blocks", (bf16, E4M3, 1, transpose, 0.0, transpose)
        yield "quantize_blocks", (x, E4M3, 128, transpose, 0.0, transpose)
        yield "quantize_mx", (bf16, E4M3, transpose)
        yield "rms_norm_quantize", (bf16, torch.ones(2, columns), ones, 1e-6, E4M3, transpose)
        yield "layer_norm_quantize", (x, torch.ones(2, columns), torch.ones(2, columns), ones, 1e-5, E4M3, transpose)
        yield "silu_gate_quantize", (bf16, bf16 + 1, ones, E4M3, transpose)
        for batch in (1, 2):
            scales = torch.full((batch, 1, 1), 0.37), torch.full((batch, 1, 1), 0.01)
            yield "scaled_mm", (a[:batch], b[:batch], *scales, None, torch.bfloat16, transpose)
            blocks = torch.rand(batch, rows, groups), torch.rand(batch, 1, groups)
            yield "scaled_mm", (a[:batch], b[:batch], *blocks, torch.ones(batch, 96), torch.float32, transpose)
        yield (
            "update_scales",
            (torch.rand(2, rows, columns), torch.ones(2, columns), torch.ones(2, columns), transpose, 0.0),
        )
    yield "dequantize", (a, torch.rand(2, rows, groups), torch.bfloat16)


def complaints(rows: int, columns: int) -> Iterator[str]:
    """Yields a line for each operator whose results on the GPU are not those on the CPU."""
    torch.manual_seed(0)
    for name, arguments in calls(rows, columns):
        op = getattr(torch.ops.scoped_fn, name)
        want = op(*arguments)
        try:
            got = op(*(a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments))
            torch.cuda.synchronize()  # so that a fault is blamed on the kernel that made it
        except torch.AcceleratorError:
            raise  # nothing runs on this GPU any more
        except Exception as error:  # noqa: BLE001 - the other operators are still worth a check
            yield f"{name}, {rows} x {columns}: {type(error).__name__}: {error}"
            continue
        pairs = [(want, got)] if isinstance(want, torch.Tensor) else list(zip(want, got, strict=True))
        bounded = name == "scaled_mm" or "norm" in name or "silu" in name
        for number, (ours, theirs) in enumerate(pairs):
            if not agree(ours.float(), theirs.cpu().float(), 1e-2 if bounded else 0.0):
                yield f"{name}, result {number}, {rows} x {columns}: differs from the CPU"


def agree(want: torch.Tensor, got: torch.Tensor, tolerance: float) -> bool:
    if tolerance == 0:
        return torch.equal(want.nan_to_num(nan=-7.0), got.nan_to_num(nan=-7.0))
    return bool((want - got).norm() <= tolerance * want.norm())


def print_times() -> None:
    """Prints a line for each kernel and baseline, as soon as it is measured."""
    from scoped_fn.kernels.gpu.timing import median_us

    print(LINE.format("kernel", "size", "us", "TB/s or TFLOP/s", "target", "baseline", "ratio"))
    for case in cases():
        name, size = f"{case.kernel} {case.variant}", f"{case.rows} x {case.columns}"
        try:
            microseconds = median_us(partial(case.prepare(), None))
            rate = (case.flops or case.bytes) / microseconds / 1e6
            for baseline, run in baselines(case):
                ratio = microseconds / median_us(run)
                numbers = f"{microseconds:.1f}", f"{rate:.2f}", str(TARGETS.get((case.kernel, case.variant, size), ""))
                print(LINE.format(name, size, *numbers, baseline, f"{ratio:.2f}"), flush=True)
        except torch.AcceleratorError:
            raise  # nothing runs on this GPU any more
        except Exception as error:  # noqa: BLE001 - the other kernels are still worth a time
            print(f"{name}, {size}: {type(error).__name__}: {error}", flush=True)
        torch.cuda.empty_cache()


def baselines(case: Case) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields what a case is compared with."""
    if not case.flops:
        source = torch.empty(case.bytes // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        yield "copy", lambda: target.copy_(source)
        return
    inner = case.flops // (2 * case.rows * case.columns)
    a, b = (torch.randn(size, inner, device="cuda").bfloat16() for size in (case.rows, case.columns))
    yield "bfloat16 mm", lambda: a @ b.T
    one = torch.ones((), device="cuda")
    a8, b8, fast = a.to(E4M3), b.to(E4M3), case.variant.startswith("fast")
    scaled: Any = getattr(torch, "_scaled_mm")  # noqa: B009 - the baseline has no public name
    yield "torch._scaled_mm", lambda: scaled(a8, b8.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)


if __name__ == "__main__":
    sys.exit(main())
