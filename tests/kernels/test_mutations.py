"""Faults planted in the operators must be caught by the checks that the other tests run (`faults.py` lists both).

The changed source runs in a module of its own behind the same front doors, and the check of that operator must fail;
with the source as it is, it must pass. For the Triton kernels that is a process of its own, since the interpreter is
switched on by an environment variable (`planted.py`).
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest

from scoped_fn.kernels import _reference
from tests.kernels.faults import (
    CHECKS,
    REFERENCE_FAULTS,
    REFERENCE_ONLY,
    TRITON_FAULTS,
    Fault,
    put_behind_the_front_doors,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def _install(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    module = ModuleType("planted")
    exec(compile(source, "planted", "exec"), module.__dict__)
    put_behind_the_front_doors(module, monkeypatch.setattr)


@pytest.mark.parametrize("name", CHECKS)
def test_the_reference_as_it_is_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    CHECKS[name]()
    _install(monkeypatch, inspect.getsource(_reference))
    CHECKS[name]()


@pytest.mark.parametrize(
    ("fault", "name"),
    [pytest.param(fault, name, id=f"{fault.name}-{name}") for fault in REFERENCE_FAULTS for name in fault.noticed_by],
)
def test_a_fault_in_the_reference_is_noticed(fault: Fault, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(_reference)
    assert source.count(fault.old) == 1, f"{fault.old!r} is in the source {source.count(fault.old)} times"
    _install(monkeypatch, fault.plant(source))
    with pytest.raises(AssertionError):
        CHECKS[name]()


@pytest.fixture(scope="module")
def planted() -> dict[str, dict[str, str]]:
    """For each fault in a Triton kernel, "" for none, what became of its checks."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.planted"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in REFERENCE_ONLY])
def test_the_kernels_as_they_are_pass(name: str, planted: dict[str, dict[str, str]]) -> None:
    assert planted[""][name] == "passed"


@pytest.mark.parametrize("fault", TRITON_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_in_a_kernel_is_noticed(fault: Fault, planted: dict[str, dict[str, str]]) -> None:
    assert set(planted[fault.name]) == set(fault.noticed_by)
    assert all(text.startswith("AssertionError") for text in planted[fault.name].values()), planted[fault.name]
