"""The tests of the Triton kernels, each in a process of its own: Triton reads TRITON_INTERPRET once, at a decorator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# One thread each: the matrices are tiny, and the machine may be shared.
SETTINGS = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def run(path: Path, **settings: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment | SETTINGS | settings,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize("path", sorted((HERE / "interpreted").glob("test_*.py")), ids=lambda path: path.stem)
def test_interpreted(path: Path) -> None:
    run(path, TRITON_INTERPRET="1")


@pytest.mark.parametrize("path", sorted((HERE / "offline_gate").glob("test_*.py")), ids=lambda path: path.stem)
def test_compiled_offline(path: Path) -> None:
    run(path)
