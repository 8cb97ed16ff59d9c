"""The training run: its parts against torch and by hand, then whole runs with a tiny model."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import scoped_fn as sf
from scoped_fn import cli
from scoped_fn.demo import compare, job, train
from scoped_fn.demo.adamw import Moments, adamw, init_moments
from scoped_fn.demo.checkpoint import resume
from scoped_fn.demo.compare_report import Contender, excess
from scoped_fn.demo.errors import UsageError
from scoped_fn.demo.gpt import GPT, GPTConfig
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.precision import RECIPES, first_state, recipe_of
from scoped_fn.demo.report import printable
from scoped_fn.demo.saved_run import SavedRun
from scoped_fn.demo.text import Corpus, read_corpus, training_batch, validation_batches
from scoped_fn.state.fp8_state import init_fp8

SMALL = GPTConfig(layers=2, width=32, context=8)
TINY = ("train", "--backend", "eager", "--layers", "1", "--width", "32", "--context", "16", "--batch", "4")
pytestmark = pytest.mark.usefixtures("one_thread")


def run(folder: Path, *options: str) -> int:
    return cli.main([*TINY, "--out", str(folder), *options])


def metrics(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "metrics.json").read_text()))


def losses(folder: Path, *options: str) -> list[float]:
    assert run(folder, "--no-timing", *options) == 0
    return list(metrics(folder)["losses"])  # type: ignore[call-overload]


# The model.


def test_model_loss_is_the_mean_cross_entropy_of_its_logits() -> None:
    model = GPT(SMALL)
    tokens, targets = torch.randint(256, (2, 3, 8), generator=torch.Generator().manual_seed(0))
    chosen = model(tokens).log_softmax(dim=-1).gather(-1, targets[..., None])
    torch.testing.assert_close(model(tokens, targets), -chosen.mean())


def test_model_sees_no_later_token() -> None:
    model = GPT(SMALL)
    tokens = torch.arange(8)[None]
    changed = torch.where(torch.arange(8) < 5, tokens, 200)
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


def test_model_head_is_the_embedding() -> None:
    names = dict(GPT(SMALL).named_parameters())
    assert "token_embedding.weight" in names
    assert "head.weight" not in names


def test_model_weights_follow_the_seed_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = GPT(SMALL, seed=1), GPT(SMALL, seed=1), GPT(SMALL, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(first.head.weight, other.head.weight)


def test_model_starts_as_a_uniform_guess() -> None:
    tokens = torch.randint(256, (4, 8), generator=torch.Generator().manual_seed(0))
    assert GPT(SMALL)(tokens, tokens.roll(1, dims=1)).item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)


def test_model_gradients_are_added_up_in_one_order() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    _, fn = sf.compile(sf.init_state(), GPT(SMALL), (tokens, tokens), backend="eager")
    code = str(fn.joint_graph)
    assert "mm" in code
    for unordered in ("embedding_dense_backward", "index_put", "scatter_add"):
        assert unordered not in code


# The optimizer.


def test_adamw_equals_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    params = {"matrix": torch.randn(3, 4, generator=generator), "vector": torch.randn(4, generator=generator)}
    mirror = {name: value.clone().requires_grad_() for name, value in params.items()}
    groups = [
        {"params": [mirror["matrix"]], "weight_decay": 0.1},
        {"params": [mirror["vector"]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.99))
    moments = init_moments(params)
    for _ in range(5):
        grads = {name: torch.randn(value.shape, generator=generator) for name, value in params.items()}
        moments, params = adamw(moments, params, grads, learning_rate=0.01)
        for name, value in mirror.items():
            value.grad = grads[name].clone()
        optimizer.step()
    for name, value in params.items():
        torch.testing.assert_close(value, mirror[name].detach())


def test_adamw_leaves_what_it_is_given() -> None:
    params, grads = {"w": torch.ones(2, 2)}, {"w": torch.ones(2, 2)}
    moments = init_moments(params)
    adamw(moments, params, grads, learning_rate=0.1)
    assert torch.equal(params["w"], torch.ones(2, 2))
    assert torch.equal(moments.mean["w"], torch.zeros(2, 2))
    assert torch.equal(moments.square["w"], torch.zeros(2, 2))


def test_learning_rate_warms_up_then_falls() -> None:
    rates = [train.learning_rate(step) for step in range(1000)]
    assert rates.index(max(rates)) == train.WARM_UP_STEPS - 1
    assert rates[0] == pytest.approx(max(rates) / train.WARM_UP_STEPS)
    assert rates[4 * train.WARM_UP_STEPS - 1] == pytest.approx(max(rates) / 2)


# The text.


def test_default_text_is_the_python_manual() -> None:
    corpus = read_corpus(None, context=128)
    assert len(corpus.training) > 300_000
    assert len(corpus.training) == pytest.approx(9 * len(corpus.validation), rel=1e-3)
    text = b"".join(bytes(part.tolist()) for part in (corpus.training, corpus.validation))
    assert b"lambda" in text
    paragraphs = text.split(b"\n\n")
    assert len(set(paragraphs)) == len(paragraphs)


def test_batches_are_windows_of_the_text() -> None:
    corpus = Corpus(torch.arange(100, dtype=torch.uint8), torch.arange(100, 140, dtype=torch.uint8))
    tokens, targets = training_batch(corpus, seed=0, step=3, batch=500, context=4)
    assert tokens.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens[:, 1:], tokens[:, :-1] + 1)
    assert tokens.min() == 0
    assert targets.max() == 99
    batches = validation_batches(corpus, count=3, batch=2, context=4)
    assert [tokens.shape for tokens, _ in batches] == [(2, 4)] * 3
    assert batches[0][0][0, 0] == 100
    assert batches[-1][1][-1, -1] == 139


def test_batches_follow_seed_and_step() -> None:
    corpus = Corpus(torch.arange(200, dtype=torch.uint8), torch.arange(50, dtype=torch.uint8))

    def tokens(seed: int, step: int) -> torch.Tensor:
        return training_batch(corpus, seed=seed, step=step, batch=8, context=4)[0]

    assert torch.equal(tokens(1, 2), tokens(1, 2))
    assert not torch.equal(tokens(1, 2), tokens(1, 3))
    assert not torch.equal(tokens(1, 2), tokens(2, 2))


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"plain text\nnext", "plain text\nnext"),
        ("é ü 日".encode(), "é ü 日"),
        (b"\x1b[31mred\x00\t", ".[31mred.."),
        (b"cut \xe2\x80", "cut ."),
        (b"[bold]", "[bold]"),
    ],
)
def test_sample_is_printable(content: bytes, shown: str) -> None:
    assert printable(content) == shown


# Whole runs.


def test_a_run_leaves_table_picture_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--steps", "4") == 0
    output = capsys.readouterr()
    for row in ("first loss", "last loss", "validation loss", "compile time", "sampled text"):
        assert row in output.out
    for row in ("step, scoped_fn", "step, torch.compile", "step, eager"):
        assert row in output.out
    assert "training 4/4  loss " in output.err
    assert output.err.endswith(f"Done; saved {tmp_path}/loss.png and {tmp_path}/metrics.json.\n")
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    written = metrics(tmp_path)
    assert written["planned_steps"] == 4
    assert (written["recipe"], written["scales"]) == ("none", [])
    assert len(written["losses"]) == 4  # type: ignore[arg-type]
    assert set(written["step_ms"]) == {"scoped_fn", "torch.compile", "eager"}  # type: ignore[call-overload]


def test_the_table_shows_markup_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "sample", lambda *_, **__: b"[bold]x[/] [/red]")
    assert run(tmp_path, "--steps", "1", "--no-timing") == 0
    assert "[bold]x[/] [/red]" in capsys.readouterr().out


def test_a_run_learns(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 50)
    trained = losses(tmp_path, "--steps", "150", "--text", str(text))
    assert trained[0] > 5
    assert trained[-1] < 1
    assert metrics(tmp_path)["validation_loss"] == pytest.approx(trained[-1], abs=0.5)


def test_same_seed_same_losses(tmp_path: Path) -> None:
    first = losses(tmp_path, "--steps", "3", "--seed", "5")
    torch.rand(3)  # the process's own generator has no say
    assert losses(tmp_path, "--steps", "3", "--seed", "5") == first
    assert losses(tmp_path, "--steps", "3", "--seed", "6") != first


def test_batches_of_a_run_follow_its_seed() -> None:
    corpus = Corpus(torch.arange(200, dtype=torch.uint8), torch.arange(50, dtype=torch.uint8))
    seen: list[torch.Tensor] = []

    def step(state: sf.CompilerState, params: train.Tensors, tokens: torch.Tensor, _: torch.Tensor) -> object:
        seen.append(tokens)
        return state, (torch.zeros(()), params)

    for seed in (1, 2, 1):
        carry = train.Carry(sf.init_state(), {}, init_moments({}), ())
        for _ in range(2):
            carry = train.train_step(carry, step, corpus, TrainOptions(seed=seed, model=SMALL))  # type: ignore[arg-type]
    assert [torch.equal(seen[0], tokens) for tokens in seen] == [True, False, False, False, True, False]
    assert torch.equal(seen[1], seen[5])


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, parts = ("--checkpoint", str(tmp_path / "whole.pt")), ("--checkpoint", str(tmp_path / "parts.pt"))
    expected = losses(tmp_path, "--steps", "6", *whole)
    assert losses(tmp_path, "--steps", "2", *parts) == expected[:2]
    assert losses(tmp_path, "--steps", "6", *parts) == expected
    one, other = (sf.load(tmp_path / name) for name in ("whole.pt", "parts.pt"))
    for part in ("params", "mean", "square", "state"):
        assert sf.tree_equal(one[part], other[part])


def test_a_finished_run_is_only_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = ("--checkpoint", str(tmp_path / "run.pt"))
    expected = losses(tmp_path, "--steps", "3", *checkpoint)
    capsys.readouterr()
    assert losses(tmp_path, "--steps", "2", *checkpoint) == expected
    output = capsys.readouterr()
    assert "training" not in output.err
    assert "no step was left to make" in output.out


def test_ctrl_c_between_steps_saves_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = losses(tmp_path, "--steps", "5")
    options = ("--steps", "5", "--checkpoint", str(tmp_path / "run.pt"))

    with monkeypatch.context() as patch:
        original = train.learning_rate
        patch.setattr(train, "learning_rate", lambda step: interrupt() if step == 2 else original(step))
        capsys.readouterr()
        assert run(tmp_path, *options) == 130
    output = capsys.readouterr()
    assert "Interrupted after 2 of 5 steps; saved " in output.err.splitlines()[-1]
    assert "2 of 5" in output.out
    assert metrics(tmp_path)["losses"] == expected[:2]
    assert metrics(tmp_path)["step_ms"] == {}
    assert sf.load(tmp_path / "run.pt")["losses"].tolist() == expected[:2]
    assert losses(tmp_path, *options) == expected


def test_ctrl_c_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "learning_rate", interrupt)
    assert run(tmp_path, "--steps", "5") == 130
    assert capsys.readouterr().err.splitlines()[-1] == "scoped-fn: interrupted."
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_timing_keeps_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "compare_steps", interrupt)
    assert run(tmp_path, "--steps", "2") == 130
    assert "Interrupted after 2 of 2 steps; saved " in capsys.readouterr().err.splitlines()[-1]
    assert metrics(tmp_path)["validation_loss"] is not None


def test_a_run_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    torch.rand(3)  # away from where any seed begins
    random, threads, grad = torch.get_rng_state(), torch.get_num_threads(), torch.is_grad_enabled()
    assert run(tmp_path, "--steps", "1") == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, grad)


# Recipes.


def test_the_names_of_recipes() -> None:
    kinds = [type(recipe_of(name)) for name in RECIPES]
    fp8 = (sf.DelayedScaling, sf.Float8CurrentScaling, sf.Float8BlockScaling, sf.MXFP8BlockScaling)
    assert kinds == [type(None), *fp8]
    for name in RECIPES:
        assert [scope.recipe for scope in first_state(3, name).autocast] == [recipe_of(name)][name == "none" :]
        assert first_state(3, name).key.tolist() == [0, 3]


def test_validation_is_in_the_scope_of_training() -> None:
    options = TrainOptions(backend="eager", recipe="current", batch=4, model=GPTConfig(1, 32, 16))
    corpus = read_corpus(None, context=16)
    carry, engine = train.build_engine(options, corpus)
    assert engine.loss.sites
    quantized = train.validate(carry, engine, corpus, options)
    plain = train.validate(replace(carry, state=sf.end_autocast(carry.state)), engine, corpus, options)
    assert quantized != plain
    assert quantized == pytest.approx(plain, rel=0.02)


def test_delayed_scaling_shows_its_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--steps", "3", "--no-timing", "--recipe", "delayed", "--checkpoint", str(tmp_path / "run.pt"))
    assert run(tmp_path, *options) == 0
    shown = capsys.readouterr().out
    assert "recipe" in shown
    (saved,) = sf.load(tmp_path / "run.pt")["state"].fp8.values()
    for row in metrics(tmp_path)["scales"]:  # type: ignore[attr-defined]
        mine = torch.tensor([role == row["role"] for _, role in saved.columns])
        scale = saved.scale[mine]
        assert row["sites"] == 6
        assert row["scale"] == [scale.min().item(), scale.max().item()]
        assert row["amax"] == [(newest := saved.amax_history[-1, mine]).min().item(), newest.max().item()]
        assert f"FP8, {row['role']}" in shown
        assert f"scale {scale.min():.3g} to {scale.max():.3g}" in shown
    assert [row["role"] for row in metrics(tmp_path)["scales"]] == ["input", "weight", "grad_output"]  # type: ignore[attr-defined]


def test_a_resumed_run_has_the_scales_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, parts = ("--checkpoint", str(tmp_path / "whole.pt")), ("--checkpoint", str(tmp_path / "parts.pt"))
    expected = losses(tmp_path, "--steps", "5", "--recipe", "delayed", *whole)
    assert losses(tmp_path, "--steps", "2", "--recipe", "delayed", *parts) == expected[:2]
    half = sf.load(tmp_path / "parts.pt")
    assert losses(tmp_path, "--steps", "5", "--recipe", "delayed", *parts) == expected
    one, other = (sf.load(tmp_path / name)["state"] for name in ("whole.pt", "parts.pt"))
    assert sf.tree_equal(one, other)
    # The scales have a say: without those of the file the losses are others.
    tensors = sf.to_tensors(half["state"]) | {"fp8.0.scale": torch.ones(18), "fp8.0.amax_history": torch.zeros(16, 18)}
    sf.save({**half, "state": sf.from_tensors(half["state"], tensors)}, tmp_path / "parts.pt")
    assert losses(tmp_path, "--steps", "5", "--recipe", "delayed", *parts) != expected


def test_a_checkpoint_of_another_model() -> None:
    empty = first_state(0, "delayed")

    def scaled(state: sf.CompilerState, site: str, scale: float) -> sf.CompilerState:
        held = init_fp8([(site, "input")], recipe_of("delayed"))
        return replace(state, fp8=state.fp8.set(0, replace(held, scale=held.scale * scale)))

    params = {"weight": torch.ones(2)}
    carry = train.Carry(scaled(empty, "head", 1.0), params, init_moments(params), ())
    saved = SavedRun({}, {"weight": torch.zeros(2)}, init_moments(params), (1.5,), scaled(empty, "head", 2.0))
    resumed = resume(carry, saved)
    assert (resumed.state.fp8[0].scale.tolist(), resumed.params["weight"].tolist()) == ([2.0], [0.0, 0.0])
    for state in (empty, scaled(empty, "tail", 1.0)):
        with pytest.raises(UsageError, match="Expected scales of the 1 columns of this model in the checkpoint, got"):
            resume(carry, replace(saved, state=state))
    short = replace(saved.state.fp8[0], amax_history=torch.zeros(8, 1))
    with pytest.raises(UsageError, match="Expected a checkpoint of this model, got another: Expected fp8"):
        resume(carry, replace(saved, state=replace(empty, fp8=empty.fp8.set(0, short))))
    for other in ({}, {"weight": torch.ones(3)}, {"bias": torch.ones(2)}, {"weight": torch.ones(2).double()}):
        for changed in (replace(saved, params=other), replace(saved, moments=Moments(0, other, other))):
            with pytest.raises(UsageError, match="Expected 1 parameters of this model in the checkpoint, got"):
                resume(carry, changed)


def test_a_run_goes_on_from_a_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    expected = losses(tmp_path, "--steps", "6", "--recipe", "delayed")
    losses(tmp_path, "--steps", "2", "--recipe", "delayed", "--checkpoint", str(first))
    assert losses(tmp_path, "--steps", "4", "--recipe", "delayed", "--resume", str(first)) == expected[:4]
    begun = first.read_bytes()
    assert sf.load(first)["losses"].tolist() == expected[:4]
    options = ("--resume", str(first), "--checkpoint", str(second))
    assert losses(tmp_path, "--steps", "6", "--recipe", "delayed", *options) == expected
    assert first.read_bytes() == begun
    assert sf.load(second)["losses"].tolist() == expected
    # Where both exist, the run goes on from the one that --resume names.
    assert losses(tmp_path, "--steps", "5", "--recipe", "delayed", *options) == expected[:5]


# Dropout.


def test_no_dropout_leaves_no_trace_in_the_graph() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    names = [name for name, _ in GPT(SMALL).named_parameters()]
    assert [name for name, _ in GPT(replace(SMALL, dropout=0.5)).named_parameters()] == names
    graphs = []
    for config in (SMALL, replace(SMALL, dropout=0.5)):
        state, fn = sf.compile(sf.init_state(), GPT(config), (tokens, tokens), backend="eager")
        after, _ = fn(state, fn.params, tokens, tokens)
        assert torch.equal(after.key, state.key) == (config is SMALL)
        graphs.append(str(fn.forward_graph))
    assert "dropout" not in graphs[0]
    assert graphs[0].count("\n") < graphs[1].count("\n")


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_a_resumed_run_drops_what_an_uninterrupted_one_drops(recipe: str, tmp_path: Path) -> None:
    options = ("--recipe", recipe, "--dropout", "0.3")
    plain = losses(tmp_path, "--steps", "4", "--recipe", recipe)
    expected = losses(tmp_path, "--steps", "4", *options)
    assert expected[0] != plain[0]
    whole = metrics(tmp_path)["validation_loss"]
    file = str(tmp_path / "run")
    assert losses(tmp_path, "--steps", "2", *options, "--checkpoint", file) == expected[:2]
    assert losses(tmp_path, "--steps", "4", *options, "--resume", file) == expected
    assert metrics(tmp_path)["validation_loss"] == whole
    other_passes = ("--steps", "4", *options, "--schedule", "1:memory_budget=0")
    assert losses(tmp_path, *other_passes) == expected


def test_validation_and_sample_are_without_dropout() -> None:
    stream = torch.get_rng_state()
    corpus, found = read_corpus(None, context=16), []
    for dropout in (0.0, 0.9):
        options = TrainOptions(backend="eager", recipe="delayed", batch=4, model=GPTConfig(1, 32, 16, dropout=dropout))
        carry, engine = train.build_engine(options, corpus)
        loss, text = train.validate(carry, engine, corpus, options), train.sample(carry, engine, options, length=5)
        found.append((loss, text))
    assert found[0] == found[1]
    assert torch.equal(torch.get_rng_state(), stream)


def test_validation_with_dropout_has_the_scales_of_the_run() -> None:
    options = TrainOptions(backend="eager", recipe="delayed", batch=4, model=GPTConfig(1, 32, 16, dropout=0.1))
    corpus = read_corpus(None, context=16)
    carry, engine = train.build_engine(options, corpus)
    before = train.validate(carry, engine, corpus, options)
    held = carry.state.fp8[0]
    wrong = replace(carry.state, fp8=carry.state.fp8.set(0, replace(held, scale=held.scale * 1e-4)))
    assert train.validate(replace(carry, state=wrong), engine, corpus, options) != before


def test_checkpoint_of_another_dropout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "run")
    losses(tmp_path, "--steps", "1", "--dropout", "0.25", "--checkpoint", file)
    capsys.readouterr()
    assert run(tmp_path, "--steps", "2", "--resume", file) == 2
    assert "Expected --dropout 0.25 as in" in capsys.readouterr().err


# Recipes side by side.


@dataclass(frozen=True)
class Compared:
    folder: Path
    table: str
    progress: str
    content: dict[str, Any]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder, table, progress = tmp_path_factory.mktemp("compared"), io.StringIO(), io.StringIO()
    with redirect_stdout(table), redirect_stderr(progress):
        assert run(folder, "--compare", "--steps", "3") == 0
    content = json.loads((folder / "comparison.json").read_text())
    return Compared(folder, table.getvalue(), progress.getvalue(), content)


def test_comparison_leaves_table_picture_and_numbers(compared: Compared) -> None:
    assert {path.name for path in compared.folder.iterdir()} == {"comparison.png", "comparison.json"}
    assert compared.progress.endswith(
        f"Done; saved {compared.folder}/comparison.png and {compared.folder}/comparison.json.\n"
    )
    assert [each["recipe"] for each in compared.content["runs"]] == list(RECIPES)
    for each in compared.content["runs"]:
        assert f"{each['recipe']} 3/3  loss " in compared.progress
        (row,) = (line for line in compared.table.splitlines() if line.startswith(f"│ {each['recipe']} "))
        for number in (f"{each['final_loss']:.4f}", f"{each['validation_loss']:.4f}", f"{each['step_ms']:.1f}"):
            assert number in row
        assert f"{each['saved_bytes'] / 2**20:.2f}" in row
    for heading in ("final loss", "against none", "validation", "step (ms)", "kept (MiB)", "grad_output"):
        assert heading in compared.table
    assert png_height(compared.folder / "comparison.png") == 960  # losses, and scales below


def leaves_of(tree: object) -> list[float]:
    """The numbers of nested dicts and lists, in order."""
    if isinstance(tree, dict):
        return [number for value in tree.values() for number in leaves_of(value)]
    if isinstance(tree, list):
        return [number for value in tree for number in leaves_of(value)]
    return [] if tree is None or isinstance(tree, str) else [float(tree)]  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_compared_run_is_the_run_of_its_recipe(recipe: str, compared: Compared, tmp_path: Path) -> None:
    (mine,) = (each for each in compared.content["runs"] if each["recipe"] == recipe)
    # With two threads matmuls of the same numbers in other places of memory may differ in the last bit.
    assert losses(tmp_path, "--steps", "3", "--recipe", recipe) == pytest.approx(mine["losses"], rel=1e-5)
    alone = metrics(tmp_path)
    assert alone["recipe"] == recipe
    assert alone["validation_loss"] == pytest.approx(mine["validation_loss"], rel=1e-5)
    assert leaves_of(alone["scales"]) == pytest.approx(leaves_of(mine["scales"]), rel=1e-3)
    assert bool(alone["scales"]) == (recipe == "delayed")


def test_losses_of_each_recipe_are_near_the_unquantized_ones(compared: Compared) -> None:
    none, *quantized = (each["losses"] for each in compared.content["runs"])
    for found in quantized:
        assert found == pytest.approx(none, rel=0.02)
        assert found != none


def test_comparison_has_the_excess_of_each_recipe(compared: Compared) -> None:
    none, *quantized = compared.content["runs"]
    assert none["excess"] is None
    for each in quantized:
        assert each["excess"] == pytest.approx(sum(each["losses"]) / sum(none["losses"]) - 1, abs=1e-12)
        assert f"{each['excess']:+.2%}" in compared.table


def test_quantized_steps_keep_less(compared: Compared) -> None:
    none, *quantized = (each["saved_bytes"] for each in compared.content["runs"])
    for kept in quantized:
        assert 0 < kept < none


def test_comparison_follows_the_scales_of_three_sites(compared: Compared) -> None:
    traces = {each["recipe"]: each["traces"] for each in compared.content["runs"]}
    assert {recipe for recipe, found in traces.items() if found} == {"delayed"}
    assert list(traces["delayed"]) == ["blocks.0.attention.qkv", "blocks.0.project", "head"]
    for roles in traces["delayed"].values():
        assert [len(roles[role]) for role in ("input", "weight", "grad_output")] == [3, 3, 3]
        assert max(len({*trace}) for trace in roles.values()) > 1


def test_final_loss_is_the_mean_of_the_last_twenty() -> None:
    contender = Contender("none", 30, (9.0,) * 10 + (1.0,) * 10 + (2.0,) * 10, 0.0, 0.0)
    assert contender.final_loss == 1.5
    longer = replace(contender, recipe="block", losses=(3.0,) * 30)
    assert excess(longer, [contender, longer]) == 1.0
    assert excess(replace(longer, planned_steps=31), [contender, longer]) is None


def test_ctrl_c_in_a_comparison_keeps_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = train.learning_rate, iter(range(100))
    monkeypatch.setattr(train, "learning_rate", lambda step: interrupt() if next(calls) == 4 else original(step))
    assert run(tmp_path, "--compare", "--steps", "3") == 130
    output = capsys.readouterr()
    assert output.err.splitlines()[-1].startswith("Interrupted after 1 of 5 runs; saved ")
    assert "delayed (1/3)" in output.out
    none, delayed = json.loads((tmp_path / "comparison.json").read_text())["runs"]
    assert (len(none["losses"]), len(delayed["losses"])) == (3, 1)
    assert (none["step_ms"], delayed["excess"]) == (None, None)
    assert delayed["validation_loss"] is not None


def test_ctrl_c_while_a_comparison_compiles_leaves_out_the_scales(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = compare.compile_run
    monkeypatch.setattr(
        compare,
        "compile_run",
        lambda options, *rest: (original if options.recipe == "none" else interrupt)(options, *rest),
    )
    assert run(tmp_path, "--compare", "--steps", "1") == 130
    assert "Interrupted after 1 of 5 runs; saved " in capsys.readouterr().err
    assert png_height(tmp_path / "comparison.png") == 540


def test_ctrl_c_before_a_comparison_has_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "learning_rate", interrupt)
    assert run(tmp_path, "--compare") == 130
    assert capsys.readouterr().err.splitlines()[-1] == "scoped-fn: interrupted."
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_comparison_is_timed_keeps_all_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "RECIPES", ("none", "current"))
    monkeypatch.setattr(compare, "median_ms", interrupt)
    assert run(tmp_path, "--compare", "--steps", "1") == 130
    assert "Interrupted after 2 of 2 runs" in capsys.readouterr().err
    runs = json.loads((tmp_path / "comparison.json").read_text())["runs"]
    assert [(each["recipe"], each["step_ms"]) for each in runs] == [("none", None), ("current", None)]


def png_height(path: Path) -> int:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000
    return int.from_bytes(content[20:24], "big")


def interrupt(*_: object, **__: object) -> float:
    raise KeyboardInterrupt
