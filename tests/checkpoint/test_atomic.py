"""Whatever happens while a file is written, its path has the old value or the new one, whole."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import scoped_fn as sf
from scoped_fn._checkpoint import atomic
from tests.checkpoint.values import exact
from tests.state.whole import whole_state

OLD, NEW = {"step": 1}, {"step": 2, "state": whole_state(), "big": torch.ones(3, 4)}
CALLS = ("open", "write", "lseek", "fsync", "close", "replace")


class Stopping:
    """`os`, but for a call that is stopped: the `number`-th of those in `CALLS`."""

    def __init__(self, number: int, stop: Callable[[], Any]) -> None:
        self.number, self.stop, self.made = number, stop, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        return self.watched(name, value) if name in CALLS else value

    def watched(self, name: str, call: Any) -> Any:
        def watched_call(*args: Any) -> Any:
            if len(self.made) == self.number:
                if name == "write":
                    call(args[0], bytes(args[1])[: len(args[1]) // 2])  # a part of it is written, as it may happen
                self.stop()
            self.made.append(name)
            return call(*args)

        return watched_call


def calls_of_a_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    watching = Stopping(-1, lambda: None)
    monkeypatch.setattr(atomic, "os", watching)
    sf.save(NEW, folder / "counted")
    monkeypatch.undo()
    return watching.made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_save_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls_of_a_save(tmp_path, monkeypatch)
    writes = made.count("write")
    assert writes > 8  # the header, each tensor, the digest
    start, end = ["open", *["write"] * (writes - 1)], ["lseek", "write", "fsync", "close", "replace"]
    assert made == [*start, *end, "open", "fsync", "close"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_failure_at_any_call_leaves_the_old_or_the_new(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(calls_of_a_save(tmp_path, monkeypatch))
    (tmp_path / "counted").unlink()
    path = tmp_path / "run"

    def stop() -> None:
        raise error

    for number in range(count):
        sf.save(OLD, path)
        monkeypatch.setattr(atomic, "os", Stopping(number, stop))
        with pytest.raises(type(error)):
            sf.save(NEW, path)
        monkeypatch.undo()
        assert names(tmp_path) == ["run"]
        expected = NEW if number >= count - 3 else OLD  # the last three see to the folder
        assert exact(sf.load(path)) == exact(expected)


KILLED = """
import os, sys
from pathlib import Path
import scoped_fn as sf
from scoped_fn._checkpoint import atomic
from tests.checkpoint.test_atomic import NEW, OLD, Stopping
from tests.checkpoint.values import exact

path, count = Path(sys.argv[1]) / "run", int(sys.argv[2])
for number in range(count + 1):
    sf.save(OLD, path)
    child = os.fork()
    if child == 0:
        atomic.os = Stopping(number, lambda: os._exit(9))
        sf.save(NEW, path)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (0 if number == count else 9), status
    loaded = exact(sf.load(path))
    print("old" if loaded == exact(OLD) else "new" if loaded == exact(NEW) else "broken")
"""


def test_a_kill_between_any_two_calls_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One child is ended at each call, in the middle of it where it writes."""
    count = len(calls_of_a_save(tmp_path, monkeypatch))
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(count)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["old"] * (count - 3) + ["new"] * 4
    left = [name for name in names(tmp_path) if name.endswith(".unfinished")]
    assert len(left) == count - 4  # a kill leaves what it was writing, under a name that no save and no load looks at


def test_saves_to_one_path_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "run"
    values = [{"step": step, "weight": torch.full((1000 + 500 * step,), float(step))} for step in range(4)]
    known = [exact(value) for value in values]
    sf.save(values[0], path)

    def save_often(value: Any) -> None:
        for _ in range(20):
            sf.save(value, path)

    with ThreadPoolExecutor(len(values)) as pool:
        runs = [pool.submit(save_often, value) for value in values]
        while not all(run.done() for run in runs):
            assert exact(sf.load(path)) in known
        for run in runs:
            run.result()
    assert names(tmp_path) == ["run"]


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "run"
    link.symlink_to("there/run")
    for value in (OLD, NEW):  # the first leads nowhere yet
        sf.save(value, link)
        assert link.is_symlink()
        assert exact(sf.load(target)) == exact(value)
    assert names(tmp_path) == ["link", "there"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_has_the_mode_that_new_files_have(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        sf.save(OLD, tmp_path / "run")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o400])
def test_a_file_that_is_replaced_passes_on_its_mode(mode: int, tmp_path: Path) -> None:
    sf.save(OLD, tmp_path / "run")
    (tmp_path / "run").chmod(mode)
    sf.save(NEW, tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == mode
    assert exact(sf.load(tmp_path / "run")) == exact(NEW)


def test_where_no_modes_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    sf.save(OLD, tmp_path / "run")
    monkeypatch.setattr(os, "chmod", refuse)
    sf.save(NEW, tmp_path / "run")
    assert exact(sf.load(tmp_path / "run")) == exact(NEW)


def test_a_value_that_cannot_be_saved_leaves_the_file(tmp_path: Path) -> None:
    sf.save(OLD, tmp_path / "run")
    with pytest.raises(sf.CheckpointError):
        sf.save({"step": 2, "hook": print}, tmp_path / "run")
    assert exact(sf.load(tmp_path / "run")) == exact(OLD)
    assert names(tmp_path) == ["run"]


def test_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="Expected a file to write to, got the folder"):
        sf.save(OLD, tmp_path)
    with pytest.raises(FileNotFoundError):
        sf.save(OLD, tmp_path / "missing" / "run")
    assert names(tmp_path) == []


def test_long_names_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run", "x" * 255, "\u00e4" * 127, os.fsdecode(b"\xff\xfe")):
        sf.save(OLD, name)
        assert exact(sf.load(name)) == exact(OLD)
    assert len(names(tmp_path)) == 4
