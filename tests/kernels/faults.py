"""Faults for the mutation check, in the reference and in the Triton kernels, and the checks that must notice them.

The checks are those of the other tests, on small fixed inputs. Each fault is a substitution in the source of one file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from scoped_fn import kernels
from tests.kernels import checks, inputs

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FRONT_DOORS = ("quantize", "matmul", "scales", "fused", "nvfp4")


def _x(*shape: int) -> torch.Tensor:
    return inputs.values(shape, torch.bfloat16, "rows apart", 3)


def _ties() -> torch.Tensor:
    return torch.from_numpy(inputs.tie_values()).reshape(1, -1)


def _history() -> torch.Tensor:
    return torch.tensor([[1.0, 4.0, 0.0, 2.0, torch.inf], [8.0, 1.0, 3.0, torch.nan, 1.0], [9.0, 1.0, 5.0, 4.0, 2.0]])


CHECKS: dict[str, Callable[[], object]] = {
    "quantize": lambda: checks.check_quantize(kernels.quantize, _x(5, 33), torch.tensor(3.0), E5M2, transpose=True),
    "huge": lambda: checks.check_quantize(kernels.quantize, torch.tensor([[1e9, -1e30]]), torch.tensor(3.0), E5M2),
    "not finite": lambda: checks.check_quantize(
        kernels.quantize, torch.tensor([[torch.inf, torch.nan, -torch.inf, 1.0]]), torch.tensor(1.0), E4M3
    ),
    "ties": lambda: checks.check_quantize(kernels.quantize, _ties(), torch.tensor(1.0), E4M3),
    "rows": lambda: checks.check_quantize(kernels.quantize, _x(5, 33), torch.rand(5, 1) + 0.5, E4M3),
    "current": lambda: checks.check_quantize_current(kernels.quantize_current, _x(5, 33), E4M3, transpose=True),
    "current, powers": lambda: checks.check_quantize_current(
        kernels.quantize_current, _x(5, 33), E4M3, power_of_2=True
    ),
    "nothing": lambda: checks.check_quantize_current(kernels.quantize_current, torch.zeros(2, 3), E4M3),
    "blocks": lambda: checks.check_quantize_blocks(kernels.quantize_blocks, _x(150, 140), E4M3, transpose=True),
    "squares": lambda: checks.check_quantize_blocks(
        kernels.quantize_blocks, _x(150, 140), E4M3, block_rows=128, transpose=True
    ),
    "mx": lambda: checks.check_quantize_mx(kernels.quantize_mx, _x(50, 70), E4M3, transpose=True),
    "max": lambda: checks.check_update_scales(
        kernels.update_scales, _history(), torch.ones(5), fp8_max=448.0, margin=1
    ),
    "max, all usable": lambda: checks.check_update_scales(
        kernels.update_scales, torch.tensor([[1.0, 4], [2, 1], [8, 2]]), torch.ones(2), fp8_max=448.0
    ),
    "most recent": lambda: checks.check_update_scales(
        kernels.update_scales, _history(), torch.ones(5), fp8_max=448.0, algorithm="most_recent"
    ),
    "matmul": lambda: checks.check_scaled_mm(
        kernels.scaled_mm,
        kernels.quantize_current(torch.randn(5, 200), E4M3),
        kernels.quantize_current(torch.randn(7, 200), E5M2),
        bias=torch.randn(7),
        out_dtype=torch.float32,
    ),
    "matmul of blocks": lambda: checks.check_scaled_mm(
        kernels.scaled_mm,
        kernels.quantize_blocks(_x(5, 200), E4M3),
        kernels.quantize_blocks(_x(150, 200), E4M3, block_rows=128),
        out_dtype=torch.float32,
    ),
    "rms norm": lambda: checks.check_rms_norm_quantize(
        kernels.rms_norm_quantize, torch.randn(5, 40), torch.randn(40), torch.tensor(9.0), E4M3, transpose=True
    ),
    "layer norm": lambda: checks.check_layer_norm_quantize(
        kernels.layer_norm_quantize, torch.randn(5, 40) / 100, torch.randn(40), torch.randn(40), torch.tensor(9.0), E4M3
    ),
    "gate": lambda: checks.check_silu_gate_quantize(
        kernels.silu_gate_quantize, torch.randn(5, 40), torch.randn(5, 40), torch.tensor(9.0), E4M3
    ),
    "nvfp4": lambda: checks.check_quantize_nvfp4(
        kernels.quantize_nvfp4,
        torch.tensor([[2688.0] + 15 * [0], [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5] + 8 * [-2.5]]),
    ),
}


class Fault(NamedTuple):
    """A substitution in the source, and the checks that must notice it."""

    name: str
    old: str
    new: str
    noticed_by: tuple[str, ...]
    file: str = "_reference.py"

    def plant(self, source: str) -> str:
        """The source with the fault; where the text is not there any more, the fault needs another one."""
        assert source.count(self.old) >= 1, f"{self.old!r} is not in {self.file}"
        return source.replace(self.old, self.new)


REFERENCE_FAULTS = (
    # The five that every suite of these kernels must notice.
    Fault("no clamp", "(-FP8_MAX[dtype], FP8_MAX[dtype])", "(-torch.inf, torch.inf)", ("huge",)),
    Fault(
        "ties go up",
        "data = saturated.to(dtype",
        "data = torch.nextafter(saturated, saturated * 2).to(dtype",
        ("ties",),
    ),
    Fault(
        "no transpose",
        "x.mT.clone(",
        "x.reshape(x.mT.shape).clone(",
        ("quantize", "current", "squares", "rms norm"),
    ),
    Fault("a window short by one", "_fmax(amax_history, 1)", "_fmax(amax_history[:, :-1], 1)", ("max",)),
    Fault(
        "division by the scale",
        "_times(values, scale[:, :, None], x)",
        "(values / scale[:, :, None])",
        ("quantize", "rows", "gate"),
    ),
    # And what else is easily got wrong.
    Fault(
        "a window short by one where all is usable",
        "amax_history.view(torch.int32).amax(1)",
        "amax_history[:, :-1].view(torch.int32).amax(1)",
        ("max, all usable",),
    ),
    Fault("the oldest row is kept", "amax_history[:, 2:], last", "amax_history[:, 1:-1], last", ("max", "most recent")),
    Fault("infinities roll", "(last > 0) & (last < torch.inf)", "(last > 0)", ("max", "most recent")),
    Fault("zeros roll", "(last > 0) & (", "(last >= 0) & (", ("max",)),
    Fault("a margin the wrong way", "2.0**-margin", "2.0**margin", ("max",)),
    Fault("infinities saturate", "if amax.isinf().any():", "if False:", ("not finite",)),
    Fault("a scale of 0 for nothing", "torch.where(scale.isinf(), largest, scale), 1.0)", "scale, 0.0)", ("nothing",)),
    Fault(
        "powers of two round up", "& EXPONENT_BITS)", "& EXPONENT_BITS).add(0x800000)", ("blocks", "current, powers")
    ),
    Fault("E8M0 rounds down", "(exponent + up.int())", "exponent", ("mx",)),
    Fault("scales of another block", "scale[:, :, None, :, None]", "scale.flip(1)[:, :, None, :, None]", ("blocks",)),
    Fault("the copy of rows in columns", "quantize_mx(x.mT, dtype, False)", "quantize_mx(x, dtype, False)", ("mx",)),
    Fault("scales of b unused", " * scale_a * scale_b.mT", " * scale_a", ("matmul",)),
    Fault("bias left out", "y + bias[:, None].float()", "y", ("matmul",)),
    Fault("epsilon left out", "(centered.square().mean(2) + eps)", "centered.square().mean(2)", ("layer norm",)),
    Fault("the sum of squares", "x.square().mean(2)", "x.square().sum(2)", ("rms norm",)),
    Fault("gate and up swapped", "silu(gate.float()) * up.float()", "silu(up.float()) * gate.float()", ("gate",)),
    Fault("ties of four bits go up", "(remainder > 0.5) |", "(remainder >= 0.5) |", ("nvfp4",)),
)
# In `kernels/gpu/`, run by the interpreter as on a GPU with poor casts.
TRITON_FAULTS = (
    Fault("no clamp", "if ROUND_FIRST:", "if False:", ("huge",), file="cast.py"),
    Fault("ties go up", "scaled = x * scale", "scaled = x * scale * 1.0000002", ("ties",), file="cast.py"),
    Fault(
        "no transpose", "tl.trans(data)", "tl.reshape(data, (BLOCK_K, BLOCK_M))", ("quantize", "current"), "quantize.py"
    ),
    Fault(
        "a window short by one",
        "tl.max(h, axis=0)",
        "tl.max(tl.where(row[:, None] < L - 1, h, 0.0), axis=0)",
        ("max", "max, all usable"),
        file="scales.py",
    ),
    Fault("division by the scale", "scaled = x * scale", "scaled = x / scale", ("quantize", "rows"), file="cast.py"),
)
# What has no Triton kernel.
REFERENCE_ONLY = ("nvfp4",)


def put_behind_the_front_doors(operators: object, set_attribute: Callable[[object, str, object], None]) -> None:
    """Lets the public functions call other implementations of the operators."""
    for name in FRONT_DOORS:
        set_attribute(sys.modules[f"scoped_fn.kernels.{name}"], "ops", operators)
