"""The command line as a user meets it: exit codes, one clear line, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import scoped_fn as sf
from scoped_fn import cli
from scoped_fn.demo import job
from scoped_fn.demo.saved_run import FORMAT

TINY = ("train", "--backend", "eager", "--no-timing", "--layers", "1", "--width", "32", "--context", "16")
pytestmark = pytest.mark.usefixtures("one_thread")


def one_line_of_stderr(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_no_arguments_print_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert "train a small GPT on real text" in shown
    assert "show time and memory of a step, node by node" in shown
    assert "show what a saved run or model holds" in shown
    assert "doctor" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"scoped-fn {sf.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--steps", "0"], "--steps: Expected a whole number of at least 1, got '0'"),
        (["train", "--steps", "many"], "--steps: Expected a whole number of at least 1, got 'many'"),
        (["train", "--seed", "-1"], "--seed: Expected a whole number of at least 0 and below 4294967296, got '-1'"),
        (["train", "--width", "40"], "--width: Expected a whole number of at least 32 that 32 divides, got '40'"),
        (["train", "--dropout", "1"], "--dropout: Expected a number from 0 to below 1, got '1'"),
        (["train", "--dropout", "nan"], "--dropout: Expected a number from 0 to below 1, got 'nan'"),
        (["train", "--dropout", "some"], "--dropout: Expected a number from 0 to below 1, got 'some'"),
        (["profile", "--dropout", "0.1"], "unrecognized arguments: --dropout 0.1"),
        (["train", "--backend", "cuda"], "--backend: invalid choice: 'cuda'"),
        (["train", "--recipe", "fp4"], "--recipe: invalid choice: 'fp4' (choose from "),
        (["train", "--recipe", "block", "--compare"], "--compare: not allowed with argument --recipe"),
        (["train", "--compare", "--checkpoint", "x.pt"], "Expected --compare without --checkpoint, got both."),
        (["train", "--compare", "--resume", "x.pt"], "Expected --compare without --resume, got both."),
        (["train", "--resume"], "--resume: expected one argument"),
        (
            ["train", "--schedule", "50"],
            "argument --schedule: Expected step:passes, got '50'. Write for instance 0:none,",
        ),
        (
            ["profile", "--passes", ""],
            "argument --passes: Expected memory_budget=F, order_for_memory or offload_saved=",
        ),
        (["profile", "--checkpoint", "x.pt"], "unrecognized arguments: --checkpoint x.pt"),
        (["train", "--no-compare"], "unrecognized arguments: --no-compare"),
        (["train", "--text"], "--text: expected one argument"),
        (["train", "--speed", "9"], "unrecognized arguments: --speed 9"),
        (["doctor", "now"], "unrecognized arguments: now"),
        (["inspect"], "the following arguments are required: FILE"),
        (["inspect", "missing.pt"], "got 'missing.pt': No such file or directory."),
    ],
)
def test_bad_option(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert complaint in one_line_of_stderr(capsys)


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--text missing.txt", "Expected a readable text file, got 'missing.txt': No such file or directory."),
        ("--text folder", "Expected a readable text file, got 'folder': Is a directory."),
        ("--text empty.txt", "Expected at least 161 bytes of text, got 0 in 'empty.txt'."),
        ("--text short.txt", "Expected at least 161 bytes of text, got 160 in 'short.txt'."),
        ("--out short.txt", "Expected a folder, got 'short.txt': File exists."),
        ("--out short.txt/deep", "Expected a folder, got 'short.txt/deep': Not a directory."),
        ("--checkpoint folder", "Expected a file, got the folder 'folder'."),
        ("--checkpoint short.txt", "Expected a checkpoint of scoped-fn train, got 'short.txt'."),
        (
            "--checkpoint torch.pt",
            "Expected a file that sf.save made, got a zip file, as torch.save makes in 'torch.pt'.",
        ),
        ("--checkpoint other.pt", "Expected a checkpoint of scoped-fn train, got 'other.pt'."),
        ("--checkpoint part.pt", "Expected a checkpoint of scoped-fn train, got 'part.pt'. It holds something else."),
        ("--resume folder", "Expected a file, got the folder 'folder'. Check --resume."),
        ("--resume missing.pt", "Expected a file to resume from, got 'missing.pt': there is none. Check --resume."),
        ("--resume new/missing.pt", "got 'new/missing.pt': there is none. Check --resume."),
        ("--resume missing.pt --checkpoint other.pt", "got 'missing.pt': there is none. Check --resume."),
        ("--resume part.pt", "got 'part.pt'. It holds something else. Give another --resume."),
    ],
)
def test_bad_file(
    option: str, complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("empty.txt").touch()
    Path("short.txt").write_text("a" * 160)
    torch.save({"weight": torch.zeros(1)}, "torch.pt")
    sf.save({"weight": torch.zeros(1)}, "other.pt")
    sf.save({"format": FORMAT, "params": {}}, "part.pt")
    assert cli.main([*TINY, *option.split()]) == 2
    assert complaint in one_line_of_stderr(capsys)
    assert not Path("new").exists()


def test_text_of_the_least_length_is_enough(tmp_path: Path) -> None:
    text = tmp_path / "enough.txt"
    text.write_text("a" * 161)
    assert cli.main([*TINY, "--steps", "1", "--text", str(text), "--out", str(tmp_path / "out")]) == 0


def test_checkpoint_of_other_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = [*TINY, "--steps", "1", "--out", str(tmp_path), "--checkpoint", str(tmp_path / "run.pt")]
    assert cli.main([*run, "--seed", "7"]) == 0
    capsys.readouterr()
    assert cli.main([*run, "--width", "64"]) == 2
    assert "Expected --seed 7 --width 32 as in" in (line := one_line_of_stderr(capsys))
    assert "got --seed 0 --width 64. Give the same or another --checkpoint." in line
    assert cli.main([*TINY, "--steps", "1", "--resume", str(tmp_path / "run.pt")]) == 2
    assert "got --seed 0. Give the same or another --resume." in one_line_of_stderr(capsys)


@pytest.mark.parametrize(("first", "then"), [("delayed", "none"), ("none", "delayed"), ("current", "mxfp8")])
def test_checkpoint_of_another_recipe(
    first: str, then: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = [*TINY, "--steps", "1", "--out", str(tmp_path), "--checkpoint", str(tmp_path / "run.pt")]
    assert cli.main([*run, "--recipe", first]) == 0
    before = (tmp_path / "run.pt").read_bytes()
    capsys.readouterr()
    assert cli.main([*run, "--recipe", then]) == 2
    assert f"Expected --recipe {first} as in" in (line := one_line_of_stderr(capsys))
    assert f"got --recipe {then}." in line
    assert (tmp_path / "run.pt").read_bytes() == before


def test_backend_that_cannot_compile(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("\nNo working C++ compiler found.\nAnd more.")

    monkeypatch.setattr(sf, "compile", fail)
    assert cli.main([*TINY, "--out", str(tmp_path)]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "got 'eager': RuntimeError: No working C++ compiler found. Run `scoped-fn doctor`" in line


def test_results_are_kept_where_the_table_cannot_be_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job, "print_table", fail)
    assert cli.main([*TINY, "--steps", "1", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "scoped-fn: [Errno 28] No space left on device"
    assert {path.name for path in tmp_path.iterdir()} == {"loss.png", "metrics.json"}


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    report = capsys.readouterr().out
    for name in ("Python", "torch", "triton", "optree", "jax", "cpu", "cuda"):
        assert f"\n  {name} " in report
    assert f" {torch.__version__}\n" in report
    findings = dict(line.split("  ", 1) for line in report.partition("backends\n  ")[2].split("\n  "))
    assert findings["eager"].strip().startswith("works (")
    assert findings["inductor"].strip().startswith("works (")
    if not torch.cuda.is_available():
        assert findings["inductor (Triton)"].strip().startswith("does not work: no GPU")


def test_doctor_says_why_a_backend_does_not_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("\n  no compiler\nand more")

    monkeypatch.setattr(sf, "compile", fail)
    assert cli.main(["doctor"]) == 0
    assert "  inductor           does not work: ValueError: no compiler\n" in capsys.readouterr().out


def test_ctrl_c_in_a_real_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scoped_fn", *TINY, "--steps", "1000000"]
    run = subprocess.Popen(
        [*command, "--checkpoint", "run.pt", "--out", "out"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with run:
        assert run.stderr is not None
        lines = iter(run.stderr.readline, "")
        assert any(line.startswith("training 1/1000000  loss ") for line in lines)
        run.send_signal(signal.SIGINT)
        table, rest = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Traceback" not in rest
    last = rest.splitlines()[-1]
    assert last.startswith("Interrupted after ")
    assert last.endswith(" of 1000000 steps; saved run.pt, out/loss.png and out/metrics.json.")
    made = len(json.loads((tmp_path / "out/metrics.json").read_text())["losses"])
    assert f"{made} of 1000000" in table
    assert len(sf.load(tmp_path / "run.pt")["losses"]) == made
