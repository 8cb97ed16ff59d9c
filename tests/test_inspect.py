"""`scoped-fn inspect`: what it shows of saved runs and engines, and what it refuses."""

import io
import json
import pickle
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import scoped_fn as sf
from scoped_fn import cli
from scoped_fn.inspect_file import SavedEngine, SavedValue, ScaleRow, read_saved
from tests.state.whole import whole_state

TINY = ("train", "--backend", "eager", "--no-timing", "--layers", "1", "--width", "32", "--context", "16")
COLUMNS = [["head", "input"], ["head", "weight"]]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    options = ("--recipe", "delayed", "--steps", "3", "--batch", "4", "--out", str(folder))
    with redirect_stdout(io.StringIO()):
        assert cli.main([*TINY, *options, "--checkpoint", str(folder / "run.pt")]) == 0
    return folder / "run.pt"


def engine_content(**changes: Any) -> dict[str, Any]:
    """The content of an engine's file with two columns, three steps of history, and changes."""
    columns = changes.pop("columns", json.dumps(COLUMNS))
    content = {
        "weight": torch.zeros(2, 3),
        "fp8.scale": torch.tensor([2.0, 8.0]),
        "fp8.amax_history": torch.tensor([[0.0, 5.0], [0.0, 3.0], [9.0, 7.0], [4.0, 6.0]]),
        "fp8.columns": torch.tensor(list(columns.encode()), dtype=torch.uint8),
    }
    content |= {name.replace("_", ".", 1): value for name, value in changes.items()}
    return {name: value for name, value in content.items() if value is not None}


def run_content(file: Path, **changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {**sf.load(file), **changes}
    return {name: value for name, value in content.items() if value is not None}


def inspect(path: Path, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The words of each line that the command prints."""
    capsys.readouterr()
    assert cli.main(["inspect", str(path)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return [line.split() for line in output.out.splitlines()]


# What is shown.


def test_a_run_shows_settings_progress_and_sizes(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, content = inspect(run_file, capsys), sf.load(run_file)
    for name, value in {"seed": 0, "batch": 4, "recipe": "delayed", "layers": 1, "width": 32, "context": 16}.items():
        assert [name, str(value)] in lines
    assert ["schema", "1"] in lines
    assert ["steps", "3"] in lines
    assert ["optimizer", "updates", "3"] in lines
    assert ["first", "loss", f"{content['losses'][0]:.4f}"] in lines
    assert ["last", "losses", *(f"{loss:.4f}" for loss in content["losses"])] in lines
    elements = sum(value.numel() for value in content["params"].values())
    assert ["float32", str(len(content["params"])), f"{elements:,}"] in lines
    assert ["params.final_norm.weight", "[32]", "float32", "128"] in lines
    assert ["state.key", "[2]", "uint32", "8"] in lines
    assert ["state", "at", "state"] in lines
    assert ["owner", "0", "gpt"] in lines


def test_a_run_shows_the_scale_of_each_site_and_role(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = inspect(run_file, capsys)
    (held,) = sf.load(run_file)["state"].fp8.values()
    assert len(held.columns) == 18
    for (site, role), scale, history in zip(held.columns, held.scale, held.amax_history.T, strict=True):
        numbers = [f"{number.item():.4g}" for number in (scale, history[-1], history.max())]
        assert [site, role, *numbers, "3"] in lines


def test_a_run_without_scales_has_no_table_of_them(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sf.save(run_content(run_file, state=sf.init_state()), tmp_path / "none")
    assert ["FP8", "scales"] not in inspect(tmp_path / "none", capsys)
    assert ["FP8", "scales"] in inspect(run_file, capsys)


def test_a_state_shows_everything_that_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sf.save(whole_state(), tmp_path / "state")
    lines = inspect(tmp_path / "state", capsys)
    for words in (
        "state",
        "key (0, 0)",
        "next token 2",
        "constant ub.fprop.is_fp8 True",
        "constant cuda.capability (10, 0)",
        "owner 0 encoder, open frames 0",
        "owner 0 override torch._inductor.config.max_autotune = True",
        "owner 1 override torch._dynamo.config.recompile_limit = 4",
        "owner 0 buffers 2",
        "owner 0 inputs 2 calls, InputSpec(int64[2])",
        "tensors 10",
        "buffers.0.mean [3] float32 12",
        "fp8.0.amax_history [4, 2] float32 32",
        "int64 3 5",
        "FP8 scales",
        "0 grad_output 1 0 0 0",
    ):
        assert words.split() in lines, words
    text = " ".join(" ".join(line) for line in lines)
    assert "scope 0 enabled; DelayedScaling(margin=0" in text
    assert "owner 0 FP8 2 columns, DelayedScaling(margin=0" in text


def test_any_value_shows_plain_data_and_each_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": whole_state(), "b": [whole_state(), 3, {"x": "y" * 300}], "empty": (), "many": list(range(60))}
    sf.save(value, tmp_path / "value")
    lines = inspect(tmp_path / "value", capsys)
    for words in ("state at a", "state at b.0", "b.1 3", "empty ()", "many.0 0", "... and 13 more"):
        assert words.split() in lines, words
    assert ["FP8", "scales", "of", "owner", "0", "at", "b.0"] in lines
    assert "y" * 300 not in "".join("".join(line) for line in lines)


def test_scales_that_owners_share_are_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = whole_state()
    sf.save(replace(state, fp8=state.fp8.set(1, state.fp8[0])), tmp_path / "state")
    lines = inspect(tmp_path / "state", capsys)
    assert lines.count(["0", "grad_output", "1", "0", "0", "0"]) == 1


def test_an_engine_shows_entries_and_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    engine = sf.Engine(model, (torch.ones(4, 8),), recipe=sf.DelayedScaling(amax_history_len=4), backend="eager")
    for _ in range(2):
        engine(torch.randn(4, 8)).square().sum().backward()
        engine.end_step()
    torch.save(engine.state_dict(), tmp_path / "engine.pt")
    lines = inspect(tmp_path / "engine.pt", capsys)
    assert ["0.weight", "[16,", "8]", "float32", "128"] in lines
    assert ["1.num_batches_tracked", "[]", "int64", "1"] in lines
    assert ["float32", "8", "276"] in lines
    assert ["int64", "1", "1"] in lines
    assert not [line for line in lines if line and line[0].startswith("fp8.")]
    for site, roles in sf.describe_fp8(engine.state).items():
        for role, held in roles.items():
            numbers = (held["scale"], held["history"][0], max(held["history"]))
            assert [site, role, *(f"{number:.4g}" for number in numbers), "2"] in lines


def test_a_staged_amax_is_the_newest(tmp_path: Path) -> None:
    torch.save(engine_content(), tmp_path / "engine.pt")
    saved = read_saved(tmp_path / "engine.pt")
    assert isinstance(saved, SavedEngine)
    assert list(saved.params) == ["weight"]
    assert saved.scales == (
        ScaleRow("head", "input", 2.0, 4.0, 9.0, 2),
        ScaleRow("head", "weight", 8.0, 5.0, 7.0, 4),
    )


def test_names_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"[bold]a[/]": torch.zeros(1), "b\x1b[31m": torch.zeros(1), "gewichtä": torch.zeros(1)}
    torch.save({**names, **engine_content(columns=json.dumps([["[/red]", "input"], ["x", "\x07"]]))}, tmp_path / "a.pt")
    first = [line[0] for line in inspect(tmp_path / "a.pt", capsys) if line]
    assert {"[bold]a[/]", "b.[31m", "gewicht\\xe4", "[/red]"} <= {*first}


# What is refused.


def refusal(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.main(["inspect", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    kinds = "a file of scoped_fn.save or a saved Engine.state_dict() with FP8 scales"
    start = f"scoped-fn: Expected {kinds}, got '{path}': "
    assert line.startswith(start)
    assert line.endswith(". Give another file.")
    return line.removeprefix(start).removesuffix(". Give another file.")


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.folder,)


def test_nothing_in_a_file_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made"
    torch.save({**engine_content(), "payload": Payload(folder)}, tmp_path / "zip.pt")
    (tmp_path / "plain.pickle").write_bytes(pickle.dumps(Payload(folder)))
    for name in ("zip.pt", "plain.pickle"):
        assert refusal(tmp_path / name, capsys) == "torch.load cannot read it as plain tensors"
        assert not folder.exists()
    pickle.loads((tmp_path / "plain.pickle").read_bytes())
    assert folder.exists()  # the payload works


def test_a_file_that_cannot_be_read(tmp_path: Path, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(tmp_path / "missing", capsys) == "No such file or directory"
    assert refusal(tmp_path, capsys) == "Is a directory"
    content = run_file.read_bytes()
    for rubbish in (b"", b"hello", content[:20], bytes(1000), content[:20] + bytes(len(content))):
        (tmp_path / "rubbish").write_bytes(rubbish)
        assert refusal(tmp_path / "rubbish", capsys) == "torch.load cannot read it as plain tensors"


@pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning")
def test_a_scripted_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.ReLU(), torch.ones(1)), tmp_path / "script.pt")
    assert refusal(tmp_path / "script.pt", capsys) == "torch.load cannot read it as plain tensors"


@pytest.mark.parametrize(
    "content",
    [
        None,
        3,
        [],
        {},
        torch.zeros(2),
        {"weight": torch.zeros(2)},
        {1: torch.zeros(2)},
        engine_content(fp8_scale=None),
        engine_content(fp8_amax_history=None),
        engine_content(fp8_columns=None),
        engine_content(fp8_scale=torch.ones(3)),
        engine_content(fp8_scale=torch.ones(2, dtype=torch.int64)),
        engine_content(fp8_scale=torch.ones(2, 1)),
        engine_content(fp8_scale=torch.ones(2, device="meta")),
        engine_content(fp8_scale=torch.ones(2).to_sparse()),
        engine_content(fp8_amax_history=torch.ones(2)),
        engine_content(fp8_amax_history=torch.ones(4, 3)),
        engine_content(fp8_amax_history=torch.ones(0, 2)),
        engine_content(fp8_columns=torch.zeros(2)),
        engine_content(columns="[["),
        engine_content(columns="3"),
        engine_content(columns="[1, 2]"),
        engine_content(columns='["ab", "cd"]'),
        engine_content(columns='[["head", "input"]]'),
        engine_content(columns='[["head", "input"], ["head"]]'),
        engine_content(columns='[["head", "input"], ["head", 3]]'),
        engine_content(columns='{"head": "input", "tail": "input"}'),
        engine_content(columns="[" * 100_000),
        {**engine_content(), "epoch": 3},
    ],
    ids=range(29),
)
def test_a_file_of_something_else(content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(content, tmp_path / "other.pt")
    assert refusal(tmp_path / "other.pt", capsys) == "it holds something else"


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "scoped-fn train 9"},
        {"more": 1},
        {"settings": None},
        {"settings": [1]},
        {"settings": {"seed": [1]}},
        {"losses": 3},
        {"losses": torch.ones(3)},
        {"losses": torch.ones(3, 1, dtype=torch.float64)},
        {"params": None},
        {"params": {"weight": 3}},
        {"mean": [torch.ones(1)]},
        {"count": "many"},
        {"state": 3},
    ],
    ids=str,
)
def test_a_run_that_is_not_whole_is_a_value_like_any_other(
    changes: dict[str, Any], run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = read_saved(run_file)
    assert isinstance(whole, SavedValue)
    assert whole.run is not None
    sf.save(run_content(run_file, **changes), tmp_path / "run.pt")
    part = read_saved(tmp_path / "run.pt")
    assert isinstance(part, SavedValue)
    assert part.run is None
    assert ["plain", "data"] in inspect(tmp_path / "run.pt", capsys)


def test_damage_is_said(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = run_file.read_bytes()
    damaged = {
        content[:-1] + bytes([content[-1] ^ 1]): "Expected contents with the digest ",
        content[: len(content) // 2]: "Expected contents with the digest ",
        content[:200] + bytes(len(content)): "Expected JSON in the header",
    }
    for bad, words in damaged.items():
        (tmp_path / "run.pt").write_bytes(bad)
        capsys.readouterr()
        assert cli.main(["inspect", str(tmp_path / "run.pt")]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        (line,) = output.err.splitlines()
        assert line.startswith(f"scoped-fn: {words}")
