"""N steps, a file, and N steps in another process are 2N steps, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import scoped_fn as sf
from tests.checkpoint.program import begin, train
from tests.checkpoint.values import exact
from tests.source_rules.rooms import ROOT

STEPS = 4
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_goes_on_in_another_process(tmp_path: Path) -> None:
    first, step = begin()
    middle = train(first, step, STEPS)
    sf.save(middle, tmp_path / "middle")
    command = [sys.executable, "-m", "tests.checkpoint.program", tmp_path / "middle", tmp_path / "end", str(STEPS)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    whole, resumed = train(middle, step, STEPS), sf.load(tmp_path / "end")
    assert exact(resumed) == exact(whole)
    assert len(set(whole["losses"])) == 2 * STEPS
    assert exact(sf.load(tmp_path / "middle")) == exact(middle)
    assert exact(first["state"].key) != exact(middle["state"].key) != exact(whole["state"].key)


def test_a_file_stays_as_large_as_it_is(tmp_path: Path) -> None:
    """Nothing in a state grows with the number of steps."""
    run, step = begin()
    sizes = []
    for _ in range(3):
        run = train(run, step, 2)
        sf.save({**run, "losses": None}, tmp_path / "run")
        sizes.append((tmp_path / "run").stat().st_size)
    assert len(set(sizes)) == 1


def test_the_state_of_another_program_is_refused(tmp_path: Path) -> None:
    """A compiled function that finds no owner, or another one, under its token says so."""
    run, step = begin()
    sf.save(sf.init_state(), tmp_path / "empty")
    with pytest.raises(sf.OwnershipError, match="Expected a state that holds owner 0"):
        step(sf.load(tmp_path / "empty"), run["params"], run["params"]["inner.0.weight"])
