"""Compiles what a launcher would launch, for a GPU that is not there, and reports what came out.

Without TRITON_INTERPRET, in a process of its own. Triton's wheel holds what this takes: ptxas, nvdisasm, LLVM for AMD.
"""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """A kernel and what it was launched with."""

    kernel: JITFunction[Any]
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True)
class Report:
    """What a kernel compiled to.

    Attributes:
        registers: Of each thread.
        spilled: Bytes of each thread's stack, and of registers that went there. On AMD, scalar registers that do not
            fit go to lanes of vector registers, not to memory: those do not count.
        shared: Bytes of shared memory.
        text: PTX, or the assembly for AMD.
        sass: The machine code of Hopper, disassembled; empty for others.
        log: What ptxas said.
    """

    registers: int
    spilled: int
    shared: int
    text: str
    sass: str
    log: str

    def count(self, pattern: str) -> int:
        """How often a pattern stands in the machine code."""
        return len(re.findall(pattern, self.sass))

    def figures(self) -> str:
        return f"{self.registers} registers, {self.spilled} spilled, {self.shared} bytes shared"


@contextmanager
def recorded_launches(module: ModuleType, arch: str, multiprocessors: int = 132) -> Iterator[list[Launch]]:
    """Launches of a module's kernels, which do not run; its launchers see `arch` whatever their tensors are on."""
    launches: list[Launch] = []
    kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}
    replaced: dict[str, Any] = {name: Recorder(kernel, launches) for name, kernel in kernels.items()}
    replaced |= {"arch_of": lambda x: arch, "processors": lambda x: multiprocessors}
    with patch.multiple(module, **{name: value for name, value in replaced.items() if hasattr(module, name)}):
        yield launches


@dataclass(frozen=True)
class Recorder:
    kernel: JITFunction[Any]
    launches: list[Launch]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def record(*positional: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in OPTIONS}
            arguments = dict(zip(self.kernel.arg_names, positional, strict=False)) | named
            assert set(arguments) == set(self.kernel.arg_names), set(arguments) ^ set(self.kernel.arg_names)
            self.launches.append(Launch(self.kernel, grid, arguments, options))

        return record


def compile_launch(launch: Launch, arch: str) -> Report:
    kind, number = arch.split(":")
    target = GPUTarget(kind, int(number) if kind == "cuda" else number, 32 if kind == "cuda" else 64)
    log = io.StringIO()
    # A kernel from the cache comes without the log of ptxas.
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    with redirect_stdout(log):
        compiled = triton.compile(source(launch, kind), target=target, options=launch.options)
    if kind == "cuda":
        return nvidia_report(compiled, log.getvalue(), disassembled(compiled) if arch == "cuda:90" else "")
    return amd_report(compiled)


def source(launch: Launch, kind: str) -> ASTSource:
    """The kernel specialized as at a launch: 1 is a constant, and what 16 divides is known to be so."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if parameter.is_constexpr or value is None or (is_int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = kind_of(value)
        # A tensor of the allocator starts at a multiple of 256 bytes.
        if isinstance(value, torch.Tensor) or (is_int and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
        # On AMD a launch says of each tensor of less than 2 GiB that 32 bits reach all of it.
        if isinstance(value, torch.Tensor) and kind == "hip":
            attributes[(index,)].append(["tt.pointer_range", 32])
    return ASTSource(launch.kernel, signature, constants, attributes)


def kind_of(value: Any) -> str:
    if not isinstance(value, TensorDescriptor):
        return str(mangle_type(value))
    element = str(mangle_type(value.base)).removeprefix("*")
    return f"tensordesc<{element}[{','.join(map(str, value.block_shape))}]>"


def disassembled(compiled: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        return subprocess.run([BINARIES / "nvdisasm", "-c", binary], capture_output=True, text=True, check=True).stdout


def nvidia_report(compiled: Any, log: str, sass: str) -> Report:
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert registers, log
    assert spilled, log
    return Report(
        registers=int(registers[1]),
        spilled=sum(map(int, spilled.groups())),
        shared=compiled.metadata.shared,
        text=compiled.asm["ptx"],
        sass=sass,
        log=log,
    )


def amd_report(compiled: Any) -> Report:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        assert found, name
        return int(found[1])

    spilled = number("private_segment_fixed_size") + number("vgpr_spill_count")
    return Report(number("vgpr_count"), spilled, compiled.metadata.shared, text, "", "")
