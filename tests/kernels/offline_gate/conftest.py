"""Everything in this folder compiles for GPUs that are not there, in a process of its own without TRITON_INTERPRET."""

import os
from pathlib import Path

import pytest

assert "TRITON_INTERPRET" not in os.environ, "Expected no TRITON_INTERPRET: interpreted kernels cannot be compiled."


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
