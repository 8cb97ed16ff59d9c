"""Schedules of `scoped-fn train`: their words, what they do to a run, and that they leave its losses alone."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import scoped_fn as sf
from scoped_fn import cli
from scoped_fn.demo import run as demo_run
from scoped_fn.demo import train
from scoped_fn.demo.changes import Change, Footprint
from scoped_fn.demo.errors import UsageError
from scoped_fn.demo.gpt import GPTConfig
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.schedule import parse_passes, parse_schedule
from scoped_fn.demo.text import read_corpus
from scoped_fn.passes import MemoryBudget, OffloadSaved, OrderForMemory

TINY = ("train", "--backend", "eager", "--no-timing", "--layers", "1", "--width", "32", "--context", "16")
EVERY_PASS = "memory_budget=0.5+order_for_memory+offload_saved=4KiB"
pytestmark = pytest.mark.usefixtures("one_thread")


def run(folder: Path, *options: str) -> dict[str, Any]:
    assert cli.main([*TINY, "--batch", "4", "--out", str(folder), *options]) == 0
    return dict(json.loads((folder / "metrics.json").read_text()))


# The words.


@pytest.mark.parametrize(
    ("text", "words", "passes"),
    [
        ("none", "none", ()),
        ("memory_budget=0.5", "memory_budget=0.5", (MemoryBudget(0.5),)),
        ("memory_budget=0", "memory_budget=0", (MemoryBudget(0.0),)),
        ("order_for_memory", "order_for_memory", (OrderForMemory(),)),
        ("offload_saved=4096", "offload_saved=4096", (OffloadSaved(4096),)),
        ("offload_saved=4KiB", "offload_saved=4KiB", (OffloadSaved(4096),)),
        ("offload_saved=2MiB", "offload_saved=2MiB", (OffloadSaved(2**21),)),
        ("offload_saved=1GiB", "offload_saved=1GiB", (OffloadSaved(2**30),)),
        (
            " memory_budget=1 + order_for_memory ",
            "memory_budget=1+order_for_memory",
            (MemoryBudget(1.0), OrderForMemory()),
        ),
    ],
)
def test_words_of_passes(text: str, words: str, passes: tuple[Any, ...]) -> None:
    named = parse_passes(text)
    assert (named.words, named.passes) == (words, passes)


def test_words_of_a_schedule() -> None:
    named = parse_schedule("0:none, 50:memory_budget=0.5+order_for_memory,100:offload_saved=4KiB")
    assert named.words == ("none", "memory_budget=0.5+order_for_memory", "offload_saved=4KiB")
    assert [step for step, _ in named.schedule.entries] == [0, 50, 100]
    assert [named.schedule.due(step) for step in (0, 49, 50, 99, 100, 1000)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Expected step:passes, got ''. Write for instance 0:none,50:memory_budget=0.5."),
        ("none", "Expected step:passes, got 'none'."),
        ("0:none,", "Expected step:passes, got ''."),
        ("+1:none", "Expected step:passes, got '+1:none'."),
        ("x:none", "Expected step:passes, got 'x:none'."),
        ("1.5:none", "Expected step:passes, got '1.5:none'."),
        ("0:", "Expected memory_budget=F, order_for_memory or offload_saved=BYTES, got ''. Join several with +"),
        ("0:smaller", "got 'smaller'. Join several with +, or write none."),
        ("0:memory_budget", "got 'memory_budget'."),
        ("0:order_for_memory=1", "got 'order_for_memory=1'."),
        ("0:none+order_for_memory", "got 'none'. Leave it alone."),
        ("0:memory_budget=2", "Expected memory_budget=F with F from 0 to 1, got 'memory_budget=2'."),
        ("0:memory_budget=nan", "Expected memory_budget=F with F from 0 to 1, got 'memory_budget=nan'."),
        ("0:memory_budget=half", "got 'memory_budget=half'. Write memory_budget=0.5."),
        ("0:offload_saved=4MB", "Expected offload_saved=BYTES with a whole number, got 'offload_saved=4MB'."),
        ("0:offload_saved=-1", "got 'offload_saved=-1'. Write offload_saved=65536, 64KiB or 4MiB."),
        ("0:order_for_memory+order_for_memory", "Expected each pass once, got order_for_memory 2 times."),
        ("50:none,0:order_for_memory", "Expected entries at rising steps, got [50, 0]."),
        ("5:none,5:order_for_memory", "Expected entries at rising steps, got [5, 5]."),
    ],
)
def test_bad_words(text: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="^Expected .*, got .*[.] [A-Z].*[.]$"):
        parse_schedule(text)
    assert cli.main(["train", "--schedule", text]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("scoped-fn: argument --schedule: Expected ")
    assert complaint.rstrip(".") in line


def test_a_schedule_and_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--compare", "--schedule", "0:none"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "scoped-fn: Expected --compare without --schedule, got both. Leave one out."


# What a change says.


def test_what_a_change_says() -> None:
    plain = Footprint(saved_bytes=80 * 2**20, peak_bytes=100 * 2**20)
    less = Footprint(saved_bytes=40 * 2**20, peak_bytes=90 * 2**20)
    assert str(Change(3, "none", 0.25, footprint=plain, plain=plain)) == (
        "step 3: none, compiled in 0.2 s, keeps 80.0 MiB, peak 100.0 MiB"
    )
    assert str(Change(3, "x", 0.25, footprint=less, plain=plain)) == (
        "step 3: x, compiled in 0.2 s, keeps 40.0 MiB of 80.0, peak 90.0 MiB of 100.0"
    )
    assert str(Change(3, "x", 0.25, ("Expected y.",))) == "step 3: x, compiled in 0.2 s. Note: Expected y."


# Runs.


def test_a_run_follows_its_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(tmp_path, "--steps", "6", "--schedule", f"0:none,2:memory_budget=0.5,4:{EVERY_PASS}")
    output = capsys.readouterr()
    first, second, third = made["schedule"]
    assert [each["step"] for each in made["schedule"]] == [0, 2, 4]
    assert [each["passes"] for each in made["schedule"]] == ["none", "memory_budget=0.5", EVERY_PASS]
    plain = first["footprint"]
    assert [each["plain"] for each in made["schedule"]] == [plain] * 3
    assert 0 < second["footprint"]["saved_bytes"] <= plain["saved_bytes"] / 2
    assert 0 < third["footprint"]["saved_bytes"] <= plain["saved_bytes"] / 2 - 4096  # which are on the host
    said = [line for line in output.err.splitlines() if line.startswith("step ")]
    assert len(said) == 3
    for line, each in zip(said, made["schedule"], strict=True):
        assert line.startswith(f"step {each['step']}: {each['passes']}, compiled in {each['compile_s']:.1f} s, keeps ")
        assert f"from step {each['step']}" in output.out
    now, before = (each["saved_bytes"] / 2**20 for each in (second["footprint"], plain))
    assert f"keeps {now:.1f} MiB of {before:.1f}, peak " in said[1]
    lines = output.err.splitlines()
    assert lines.index(said[1]) < next(i for i, line in enumerate(lines) if line.startswith("training 3/6  loss "))
    assert lines.index(said[1]) > next(i for i, line in enumerate(lines) if line.startswith("training 2/6  loss "))


def test_a_schedule_leaves_the_losses_alone(tmp_path: Path) -> None:
    expected = run(tmp_path, "--steps", "6")
    assert expected["schedule"] == []
    for schedule in ("0:none", f"0:none,2:memory_budget=0,4:{EVERY_PASS}", f"0:{EVERY_PASS},3:none"):
        made = run(tmp_path, "--steps", "6", "--schedule", schedule)
        assert made["losses"] == expected["losses"]
    first, second = made["schedule"]
    assert first["footprint"]["saved_bytes"] < first["plain"]["saved_bytes"]
    assert first["plain"] == second["footprint"]


def test_a_schedule_that_begins_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(tmp_path, "--steps", "3", "--schedule", "2:order_for_memory,7:none")
    assert [each["step"] for each in made["schedule"]] == [2]
    assert "step 2: order_for_memory, " in capsys.readouterr().err


@pytest.mark.parametrize("stop", [2, 3])  # at an entry, and between two
def test_a_run_resumed_within_its_schedule(stop: int, tmp_path: Path) -> None:
    options = ("--schedule", f"0:memory_budget=0.5,2:{EVERY_PASS},4:none")
    expected = run(tmp_path, *options, "--steps", "5")["losses"]
    parts = ("--checkpoint", str(tmp_path / "parts.pt"))
    assert run(tmp_path, *options, *parts, "--steps", str(stop))["losses"] == expected[:stop]
    resumed = run(tmp_path, *options, *parts, "--steps", "5")
    assert resumed["losses"] == expected
    assert [(each["step"], each["passes"]) for each in resumed["schedule"]] == [(stop, EVERY_PASS), (4, "none")]


def test_a_resumed_schedule_moves_no_scale(tmp_path: Path) -> None:
    recipe, parts = ("--recipe", "delayed"), ("--checkpoint", str(tmp_path / "parts.pt"))
    expected = run(tmp_path, *recipe, "--steps", "4")
    options = (*recipe, *parts, "--schedule", f"1:{EVERY_PASS}")
    run(tmp_path, *options, "--steps", "2")
    made = run(tmp_path, *options, "--steps", "4")
    assert made["losses"] == expected["losses"]
    assert made["scales"] == expected["scales"]


def test_a_run_may_go_on_with_another_schedule(tmp_path: Path) -> None:
    expected = run(tmp_path, "--steps", "4")["losses"]
    parts = ("--checkpoint", str(tmp_path / "parts.pt"))
    run(tmp_path, *parts, "--steps", "1", "--schedule", "0:memory_budget=0")
    run(tmp_path, *parts, "--steps", "2", "--schedule", "0:order_for_memory")
    assert run(tmp_path, *parts, "--steps", "4")["losses"] == expected
    assert "schedule" not in sf.load(tmp_path / "parts.pt")["settings"]


def tiny_options(schedule: str) -> TrainOptions:
    return TrainOptions(backend="eager", batch=2, model=GPTConfig(1, 32, 16), schedule=parse_schedule(schedule))


def test_runs_and_engines_are_values() -> None:
    options, corpus = tiny_options("0:none,1:memory_budget=0.5"), read_corpus(None, context=16)
    start, engine = train.build_engine(options, corpus)
    kept = train.advance_engine(start, engine, corpus, options)
    assert kept[0] is start
    assert kept[1] is engine
    assert train.due_passes(start, engine, options) is None
    after = train.train_step(start, engine.step, corpus, options)
    assert train.due_passes(after, engine, options) == "memory_budget=0.5"
    then, changed = train.advance_engine(after, engine, corpus, options)
    assert train.due_passes(then, changed, options) is None
    assert changed.step is not engine.step
    assert changed.loss.entry == 1
    assert engine.loss.entry == 0
    assert then.params is after.params
    # What came before works as it did: the next step has two engines to choose from, and they agree.
    new, old = (train.train_step(*each, corpus, options) for each in ((then, changed.step), (after, engine.step)))
    assert new.losses == old.losses
    for name, value in new.params.items():
        assert torch.equal(value, old.params[name])


def test_passes_profile_the_batch_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    options, corpus = tiny_options("0:none,1:memory_budget=0.5"), read_corpus(None, context=16)
    carry, engine = train.build_engine(options, corpus)
    carry = train.train_step(carry, engine.step, corpus, options)
    pushed: list[Any] = []
    original = sf.push_inputs
    monkeypatch.setattr(
        sf, "push_inputs", lambda state, owner, inputs: pushed.append(inputs) or original(state, owner, inputs)
    )
    carry, engine = train.advance_engine(carry, engine, corpus, options)
    ((tokens, _),) = pushed
    assert torch.equal(tokens, train._batch(1, corpus, options)[0])
    assert not carry.state.inputs[engine.loss.owner].entries  # used up


def test_the_speed_is_that_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    advance, step = train.advance_engine, train.train_step

    def slow_advance(*args: Any) -> Any:
        clock[0] += 1000
        return advance(*args)

    def slow_step(*args: Any) -> Any:
        clock[0] += 1
        return step(*args)

    monkeypatch.setattr(demo_run, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(demo_run, "advance_engine", slow_advance)
    monkeypatch.setattr(demo_run, "train_step", slow_step)
    made = run(tmp_path, "--steps", "4", "--schedule", "1:none,2:order_for_memory")
    assert (made["training_s"], made["tokens_per_second"]) == (4, 4 * 16)


def test_what_a_pass_warns_of_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = sf.advance

    def warning_advance(state: sf.CompilerState, loss: sf.CompiledFn, step: int) -> Any:
        if step == 1:
            warnings.warn("Expected at most 5 saved bytes, got 6. Raise [the] fraction.", stacklevel=2)
        return original(state, loss, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sf, "advance", warning_advance)
        made = run(tmp_path, "--steps", "2", "--schedule", "0:none,1:memory_budget=0.5")
    said = "Expected at most 5 saved bytes, got 6. Raise [the] fraction."
    assert [each["remarks"] for each in made["schedule"]] == [[], [said]]
    output = capsys.readouterr()
    assert f". Note: {said}\n" in output.err
    assert "Raise [the]" in " ".join(output.out.replace("│", " ").split())


def test_an_entry_that_cannot_be_compiled_saves_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory\nand more")

    expected = run(tmp_path, "--steps", "4")["losses"]
    options = ("--steps", "4", "--checkpoint", str(tmp_path / "run.pt"))
    with monkeypatch.context() as patch:
        patch.setattr(demo_run, "advance_engine", fail)
        words = [*TINY, "--batch", "4", "--out", str(tmp_path), *options, "--schedule", "2:order_for_memory"]
        assert cli.main(words) == 1
    assert "got 'eager': RuntimeError: no memory." in capsys.readouterr().err.splitlines()[-1]
    assert sf.load(tmp_path / "run.pt")["losses"].tolist() == expected[:2]
    assert run(tmp_path, *options)["losses"] == expected


def test_ctrl_c_while_an_entry_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_run, "advance_engine", interrupt)
    words = [*TINY, "--batch", "4", "--out", str(tmp_path), "--steps", "4", "--schedule", "0:none,2:order_for_memory"]
    assert cli.main(words) == 130
    assert "Interrupted after 2 of 4 steps; saved " in capsys.readouterr().err.splitlines()[-1]
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert len(written["losses"]) == 2
    assert [each["step"] for each in written["schedule"]] == [0]
