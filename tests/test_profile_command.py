"""`scoped-fn profile`: its table, picture and numbers, and what is in use at the peak."""

import json
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import scoped_fn as sf
from scoped_fn import cli
from scoped_fn.demo import profile_picture
from scoped_fn.demo.gpt import GPT, GPTConfig
from scoped_fn.demo.precision import first_state
from scoped_fn.demo.profile_peak import held_at_peak, modules_of
from scoped_fn.demo.profile_picture import draw_timeline
from scoped_fn.demo.schedule import parse_passes

MEBIBYTE = 2**20
TINY = ("profile", "--layers", "1", "--width", "32", "--context", "16", "--batch", "4")
MODEL = GPTConfig(layers=2, width=64, context=32)
pytestmark = pytest.mark.usefixtures("one_thread")


def run(folder: Path, *options: str) -> dict[str, Any]:
    assert cli.main([*TINY, "--out", str(folder), *options]) == 0
    return dict(json.loads((folder / "profile.json").read_text()))


def row(table: str, name: str) -> list[str]:
    """The words of the row of a table that begins with a name."""
    (line,) = (line for line in table.splitlines() if line.startswith(name))
    return line.removeprefix(name).split()


def profiled(passes: str, recipe: str = "none") -> tuple[sf.CompiledFn, sf.Profile]:
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    options = {"backend": "eager", "passes": parse_passes(passes).passes}
    state, fn = sf.compile(first_state(0, recipe), GPT(MODEL), (tokens, tokens.roll(1, 1)), **options)
    return fn, sf.profile(state, fn)[1]


# The command.


def test_a_profile_leaves_table_picture_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = run(tmp_path, "--top", "3")
    output = capsys.readouterr()
    assert {path.name for path in tmp_path.iterdir()} == {"memory.png", "profile.json"}
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert output.err.splitlines()[-1] == f"Done; saved {tmp_path}/memory.png and {tmp_path}/profile.json."
    assert "running a step node by node ..." in output.err
    (step,) = written["steps"]
    assert (written["backend"], written["model"]["layers"], step["passes"]) == ("eager", 1, "without passes")
    found = step["profile"]
    assert (found["complete"], found["synthetic"]) == (True, False)
    assert row(output.out, "nodes") == [str(len(found["nodes"]))]
    assert row(output.out, "time of all nodes (ms)") == [f"{1e3 * found['seconds']:.1f}"]
    assert row(output.out, "kept for the backward (MiB)") == [f"{found['saved_bytes'] / MEBIBYTE:.2f}"]
    assert row(output.out, "peak beside parameters and inputs (MiB)") == [f"{found['peak_bytes'] / MEBIBYTE:.2f}"]
    assert row(output.out, "inputs") == ["real"]
    assert row(output.out, "complete") == ["yes"]
    slowest = max(found["nodes"], key=lambda node: node["seconds"])
    assert f"{1e3 * slowest['seconds']:.2f}" in output.out
    largest = step["held_at_peak"][0]
    assert row(output.out.partition("Most memory at the peak")[2], largest["name"])[-3:] == [
        largest["graph"],
        f"{largest['bytes'] / MEBIBYTE:.2f}",
        f"{largest['bytes'] / found['peak_bytes']:.1%}",
    ]
    assert f"{len(found['nodes']) - 3} others" in output.out
    assert f"{len(step['held_at_peak']) - 3} others" in output.out


def test_a_profile_before_and_after_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = run(tmp_path, "--passes", "memory_budget=0.5+order_for_memory")
    output = capsys.readouterr()
    plain, changed = (step["profile"] for step in written["steps"])
    assert [step["passes"] for step in written["steps"]] == ["without passes", "memory_budget=0.5+order_for_memory"]
    assert 0 < changed["saved_bytes"] <= plain["saved_bytes"] / 2
    assert changed["peak_bytes"] < plain["peak_bytes"]
    before, after = plain["saved_bytes"] / MEBIBYTE, changed["saved_bytes"] / MEBIBYTE
    kept = [f"{before:.2f}", f"{after:.2f}", f"({changed['saved_bytes'] / plain['saved_bytes'] - 1:+.0%})"]
    assert row(output.out, "kept for the backward (MiB)") == kept
    assert row(output.out, "complete") == ["yes", "yes"]
    assert "Most time, with passes" in output.out
    assert "compiling with memory_budget=0.5+order_for_memory ..." in output.err


@pytest.mark.parametrize("options", [(), ("--backend", "inductor"), ("--recipe", "delayed"), ("--passes", "none")])
def test_kinds_of_profiles(options: tuple[str, ...], tmp_path: Path) -> None:
    for step in run(tmp_path, *options)["steps"]:
        assert step["profile"]["complete"]
        nodes = step["profile"]["nodes"]
        assert {node["graph"] for node in nodes} == {"forward", "backward"}
        assert any("quantize" in node["op"] for node in nodes) == ("delayed" in options)
        assert any("gelu" in node["op"] for node in nodes) == ("inductor" not in options)  # which takes it apart
        assert sum(holding["bytes"] for holding in step["held_at_peak"]) == step["profile"]["peak_bytes"]


def test_what_passes_warn_of_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = sf.recompile

    def warning_recompile(*args: Any, **options: Any) -> Any:
        warnings.warn("Expected at most 5 saved bytes,\ngot 6. Raise [the] fraction.", stacklevel=2)
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sf, "recompile", warning_recompile)
        written = run(tmp_path, "--passes", "order_for_memory")
    said = "Expected at most 5 saved bytes, got 6. Raise [the] fraction."
    assert written["steps"][1]["remarks"] == [said]
    assert f"Note: {said}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--passes", "smaller"],
            "argument --passes: Expected memory_budget=F, order_for_memory or offload_saved=BYTES",
        ),
        (["--passes", "memory_budget=2"], "Expected memory_budget=F with F from 0 to 1, got 'memory_budget=2'."),
        (["--top", "0"], "argument --top: Expected a whole number of at least 1, got '0'"),
        (["--width", "40"], "argument --width: Expected a whole number of at least 32 that 32 divides, got '40'"),
        (["--steps", "3"], "unrecognized arguments: --steps 3"),
        (["--text", "missing.txt"], "Expected a readable text file, got 'missing.txt': No such file or directory."),
        (["--out", "file.txt"], "Expected a folder, got 'file.txt': File exists. Check --out."),
    ],
)
def test_bad_option(
    arguments: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.txt").touch()
    assert cli.main([*TINY, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_a_step_that_fails_half_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sf.profile

    def failing(*args: Any) -> Any:
        state, profile = original(*args)
        return state, replace(profile, nodes=profile.nodes[:50], error="RuntimeError: no memory.")

    monkeypatch.setattr(sf, "profile", failing)
    assert cli.main([*TINY, "--out", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert output.err.splitlines()[-1] == (
        "scoped-fn: Expected every node to run, got RuntimeError: no memory. "
        f"{tmp_path}/memory.png and {tmp_path}/profile.json hold those that did."
    )
    assert row(output.out, "complete") == ["no:", "RuntimeError:", "no", "memory."]
    assert json.loads((tmp_path / "profile.json").read_text())["steps"][0]["profile"]["complete"] is False


def test_a_backend_that_cannot_compile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("\nNo working C++ compiler found.\nAnd more.")

    monkeypatch.setattr(sf, "compile", fail)
    assert cli.main([*TINY, "--out", str(tmp_path)]) == 1
    assert "got 'eager': RuntimeError: No working C++ compiler found. Run" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_a_real_process(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "scoped_fn", "profile", "--batch", "64", "--context", "512", "--out", "out"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with run:
        assert run.stderr is not None
        assert any(line.startswith("running a step node by node") for line in iter(run.stderr.readline, ""))
        run.send_signal(signal.SIGINT)
        table, rest = run.communicate(timeout=60)
    assert (run.returncode, table, rest) == (130, "", "scoped-fn: interrupted.\n")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_profile_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    torch.rand(3)  # away from where any seed begins
    random, threads, grad = torch.get_rng_state(), torch.get_num_threads(), torch.is_grad_enabled()
    run(tmp_path, "--passes", "memory_budget=0.5")
    assert torch.equal(torch.get_rng_state(), random)
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, grad)


# What is in use at the peak.


@pytest.mark.parametrize("recipe", ["none", "delayed", "block"])
@pytest.mark.parametrize("passes", ["none", "memory_budget=0.3+order_for_memory+offload_saved=8KiB"])
def test_what_is_held_adds_up_to_the_peak(recipe: str, passes: str) -> None:
    fn, profile = profiled(passes, recipe)
    held = held_at_peak(fn, profile)
    assert sum(each.bytes for each in held) == profile.peak_bytes
    assert [each.bytes for each in held] == sorted((each.bytes for each in held), reverse=True)
    assert profile.peak_node is not None
    assert profile.peak_node.graph == "backward"
    assert {each.graph for each in held} == {"forward", "backward"}


def test_what_is_held_of_an_inference_graph() -> None:
    x = torch.ones(64)
    with torch.no_grad():
        state, fn = sf.compile(sf.init_state(), lambda x: ((x * 2).sin() + 1).sum(), (x,), backend="eager")
        _, profile = sf.profile(state, fn)
    held = held_at_peak(fn, profile)
    assert [(each.name, each.graph, each.bytes) for each in held] == [
        ("mul", "inference", 256),
        ("sin", "inference", 256),
    ]
    assert held_at_peak(fn, replace(profile, nodes=())) == ()
    assert held_at_peak(fn, sf.profile(state, fn, training=True)[1]) == ()


def test_modules_of_nodes() -> None:
    fn, profile = profiled("none")
    where = modules_of(fn)
    found = {(node.graph, where[node.graph, node.name]) for node in profile.nodes}
    for graph in ("forward", "backward"):
        assert {(graph, "blocks.1.attention.qkv"), (graph, "head"), (graph, "")} <= found
    names = {name for name, _ in GPT(MODEL).named_modules()}
    assert set(where.values()) <= names


# The picture.


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    made: list[Figure] = []
    monkeypatch.setattr(profile_picture, "Figure", lambda **options: made.append(Figure(**options)) or made[-1])
    return made


def test_what_is_drawn(tmp_path: Path, figures: list[Figure]) -> None:
    (_, plain), (_, changed) = profiled("none"), profiled("memory_budget=0.5")
    draw_timeline(tmp_path / "memory.png", {"without passes": plain, "memory_budget=0.5": changed})
    ((axes,),) = (figure.axes for figure in figures)
    after, during, *_ = axes.patches[2:]  # the shades of forward and backward come first
    assert during.get_data().values.tolist() == [node.peak_bytes / MEBIBYTE for node in plain.nodes]
    assert after.get_data().values.tolist() == [node.live_bytes / MEBIBYTE for node in plain.nodes]
    forward = sum(node.graph == "forward" for node in plain.nodes)
    assert (during.get_data().edges[0], during.get_data().edges[-1]) == (-forward, len(plain.nodes) - forward)
    for line, profile in zip(axes.lines, (plain, changed), strict=True):
        peak = profile.peak_node
        assert peak is not None
        (x,), (y,) = line.get_data()
        assert y == profile.peak_bytes / MEBIBYTE
        at = int(x + sum(node.graph == "forward" for node in profile.nodes))
        assert profile.nodes[at] == peak
        assert f"{peak.name}: {y:.1f} MiB" in [text.get_text() for text in axes.texts]
    assert {"forward", "backward"} <= {text.get_text() for text in axes.texts}
    (legend,) = figures[0].legends
    first, second = (text.get_text() for text in legend.get_texts())
    assert first.startswith(f"without passes: peak {plain.peak_bytes / MEBIBYTE:.1f} MiB, kept ")
    assert second.startswith("memory_budget=0.5: peak ")


def test_pictures_of_other_profiles(tmp_path: Path, figures: list[Figure]) -> None:
    state, fn = sf.compile(sf.init_state(), lambda x: x * 2, (torch.ones(4),), backend="eager")
    _, profile = sf.profile(state, fn)
    draw_timeline(tmp_path / "inference.png", {"all": profile})
    draw_timeline(tmp_path / "empty.png", {"nothing": replace(profile, nodes=())})
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["forward", "mul: 0.0 MiB"]
    assert [text.get_text() for text in figures[1].axes[0].texts] == []
    for name in ("inference.png", "empty.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
