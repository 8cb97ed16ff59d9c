"""``scoped-fn doctor``: what is installed, on which devices, and which backends work here."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from typing import TextIO

import torch
from torch import Tensor

import scoped_fn as sf
from scoped_fn._detect import installed_version
from scoped_fn.demo.errors import first_line

PACKAGES = ("torch", "triton", "optree", "jax", "jaxlib")
NO_GPU = "no GPU that torch can use, and Triton compiles for GPUs"
NO_TRITON = "Triton is not installed"


def run_doctor(out: TextIO) -> int:
    """Writes the report, each line as soon as it is known, and returns the exit code 0."""
    for title, lines in (("versions", versions()), ("devices", devices()), ("backends", backends())):
        out.write(f"{title}\n")
        for name, finding in lines:
            out.write(f"  {name:<18} {finding}\n")
            out.flush()
    return 0


def versions() -> Iterator[tuple[str, str]]:
    """Yields the name and version of Python and of each package that matters."""
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "scoped_fn", sf.__version__
    for package in PACKAGES:
        yield package, installed_version(package) or "not installed"


def devices() -> Iterator[tuple[str, str]]:
    """Yields each device and what it can do."""
    yield "cpu", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        yield "cuda", f"none ({built})"
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, capability {major}.{minor}"


def backends() -> Iterator[tuple[str, str]]:
    """Yields each backend and whether it works here, found by compiling and running a function with it."""
    yield "eager", try_backend("eager", torch.device("cpu"))
    yield "inductor", try_backend("inductor", torch.device("cpu"))
    reason = None if torch.cuda.is_available() else NO_GPU
    reason = reason if installed_version("triton") else NO_TRITON
    # On a GPU Inductor writes Triton kernels, so this one compiles and runs Triton.
    yield "inductor (Triton)", f"does not work: {reason}" if reason else try_backend("inductor", torch.device("cuda"))


def try_backend(backend: str, device: torch.device) -> str:
    """Returns "works" with the seconds it took, or what kept a small function from compiling or being right."""
    function = _new_function()
    x = torch.linspace(1, 2, 64, device=device)
    started = time.perf_counter()
    try:
        state, compiled = sf.compile(sf.init_state(), function, (x,), backend=backend)
        _, result = compiled(state, x)
        correct = torch.allclose(result, function(x))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return f"does not work: {type(error).__name__}: {first_line(error)}"
    return f"works ({time.perf_counter() - started:.1f} s)" if correct else "does not work: a wrong result"


def _new_function() -> Callable[[Tensor], Tensor]:
    """Returns a function unlike any before, so that no cache on disk answers in the compiler's place."""
    number = 1 + time.time_ns() % 1_000_003 / 1_000_003
    return lambda x: torch.sin(x) * number + x.sum()
