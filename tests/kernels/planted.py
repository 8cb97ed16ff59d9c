"""Runs the checks of the mutation test over the Triton kernels: TRITON_INTERPRET=1 python -m tests.kernels.planted

For each fault a copy of `kernels/gpu` with it is imported instead of the room's own. The interpreter casts as a GPU
does whose casts round twice and overflow, so that a missing clamp shows.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from scoped_fn.kernels import gpu
from tests.kernels import interpreter
from tests.kernels.faults import CHECKS, REFERENCE_ONLY, TRITON_FAULTS, Fault, put_behind_the_front_doors

ROOM = Path(gpu.__file__).parent
LAUNCHERS = {
    "quantize": "quantize",
    "quantize_current": "quantize",
    "quantize_blocks": "blocks",
    "quantize_mx": "mx",
    "dequantize": "dequantize",
    "scaled_mm": "matmul",
    "update_scales": "scales",
    "rms_norm_quantize": "norms",
    "layer_norm_quantize": "norms",
    "silu_gate_quantize": "gate",
}


def copy_with(fault: Fault | None, folder: Path) -> None:
    """Copies the kernels, for a GPU with poor casts, with the fault."""
    shutil.copytree(ROOM, folder, ignore=shutil.ignore_patterns("__pycache__"))
    launch = folder / "launch.py"
    text = launch.read_text()
    assert text.count('"cuda:90"') >= 1
    launch.write_text(text.replace('INTERPRETED_ARCH: Final = "cuda:90"', 'INTERPRETED_ARCH: Final = "hip:gfx942"'))
    if fault is not None:
        changed = folder / fault.file
        changed.write_text(fault.plant(changed.read_text()))


def operators_in(folder: Path) -> SimpleNamespace:
    """The launchers of a copy, by the names of the operators."""
    for name in [name for name in sys.modules if name.startswith(f"{gpu.__name__}.")]:
        del sys.modules[name]
    gpu.__path__ = [str(folder)]
    importlib.invalidate_caches()
    modules = {file: importlib.import_module(f"{gpu.__name__}.{file}") for file in set(LAUNCHERS.values())}
    return SimpleNamespace(**{name: getattr(modules[file], name) for name, file in LAUNCHERS.items()})


def outcome(check: str) -> str:
    try:
        CHECKS[check]()
    except Exception as error:  # noqa: BLE001 - what it was is the result
        return f"{type(error).__name__}: {str(error)[:2000]}"
    return "passed"


def main() -> None:
    interpreter.install()
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder, interpreter.poor_casts():
        for index, fault in enumerate((None, *TRITON_FAULTS)):
            copy = Path(folder) / str(index)
            copy_with(fault, copy)
            put_behind_the_front_doors(operators_in(copy), setattr)
            names = [name for name in CHECKS if name not in REFERENCE_ONLY] if fault is None else fault.noticed_by
            outcomes["" if fault is None else fault.name] = {name: outcome(name) for name in names}
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
