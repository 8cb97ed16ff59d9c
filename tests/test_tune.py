"""`scoped-fn tune` without a GPU: the walk over configurations, and the table that it writes."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scoped_fn import cli, tune
from scoped_fn.kernels import _tiles as tiles
from scoped_fn.kernels._tiles import TILES, Tile
from scoped_fn.tune_cases import Case, Run, cases

TABLE = Path(tiles.__file__)


def case_of(run: Run, exact: bool = True) -> Case:
    return Case("quantize", "", 8, 8, lambda: run, bytes=1, exact=exact)


def walk(run: Run, cost_us: dict[Tile, float], start: Tile, exact: bool = True) -> tuple[Tile, float, float]:
    """Tunes with times from a table, a second for what is not there, in place of a clock."""
    seen: list[Tile] = []

    def watched(tile: Tile | None) -> tuple[torch.Tensor, ...]:
        assert tile is not None
        seen.append(tile)
        return run(tile)

    def measure_us(again: object) -> float:
        assert callable(again)
        again()
        return cost_us.get(seen[-1], 1e6)

    return tune.tune(case_of(watched, exact), start, measure_us)


START = Tile(block_m=16, block_k=256, warps=4, stages=1)
BETTER, BEST = replace(START, warps=8), replace(START, warps=8, stages=2)


def test_walks_to_the_fastest() -> None:
    assert walk(lambda _: (torch.ones(3),), {START: 10, BETTER: 8, BEST: 6}, START) == (BEST, 10, 6)


def test_noise_changes_nothing() -> None:
    assert walk(lambda _: (torch.ones(3),), {START: 10, BETTER: 9.9}, START) == (START, 10, 10)


@pytest.mark.parametrize("exact", [True, False])
def test_a_configuration_with_other_results_is_passed_over(exact: bool) -> None:
    def run(tile: Tile | None) -> tuple[torch.Tensor, ...]:
        return (torch.ones(3) * (1.5 if tile == BETTER else 1.0),)

    assert walk(run, {START: 10, BETTER: 8}, START, exact)[0] == START


def test_a_sum_in_another_order_is_no_other_result() -> None:
    def run(tile: Tile | None) -> tuple[torch.Tensor, ...]:
        return (torch.ones(3) * (1.001 if tile == BETTER else 1.0),)

    assert walk(run, {START: 10, BETTER: 8}, START, exact=False)[0] == BETTER
    assert walk(run, {START: 10, BETTER: 8}, START, exact=True)[0] == START


def test_a_configuration_that_does_not_compile_is_passed_over() -> None:
    def run(tile: Tile | None) -> tuple[torch.Tensor, ...]:
        if tile == BETTER:
            raise RuntimeError("out of resource: shared memory")
        return (torch.ones(3),)

    assert walk(run, {START: 10, BETTER: 8}, START)[0] == START


def test_the_table_as_it_is_is_written_as_it_is(tmp_path: Path) -> None:
    copy = tmp_path / "_tiles.py"
    copy.write_text(TABLE.read_text())
    tune.write_table(copy, TILES)
    assert read_table(copy) == dict(TILES)
    assert copy.read_text() == TABLE.read_text()
    assert list(tmp_path.iterdir()) == [copy]


def test_a_tuned_entry_is_found_on_its_architecture_only(tmp_path: Path) -> None:
    copy = tmp_path / "_tiles.py"
    copy.write_text(TABLE.read_text())
    tuned = Tile(block_m=2, block_k=64, warps=1, stages=5)
    tune.write_table(copy, {**TILES, ("quantize", "", "", "cuda:90"): tuned})
    module = load(copy)
    assert tune.show(module.tile_for("quantize", 9, 9, arch="cuda:90")) == tune.show(tuned)
    assert tune.show(module.tile_for("quantize", 9, 9, arch="cuda:100")) == tune.show(tiles.tile_for("quantize", 9, 9))


def load(path: Path) -> object:
    spec = importlib.util.spec_from_file_location("tuned_tiles", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def read_table(path: Path) -> dict[tuple[str, ...], Tile]:
    shown = {key: tune.show(tile) for key, tile in load(path).TILES.items()}  # type: ignore[attr-defined]
    return {key: TILES[key] for key, text in shown.items() if tune.show(TILES[key]) == text}


def test_every_case_has_a_configuration() -> None:
    for case in (case for case in cases() if case.vary):
        tile = tiles.tile_for(case.kernel, case.rows, case.columns, variant=case.variant)
        assert {"warps", "stages"} <= set(case.vary)
        assert tile in TILES.values()


def test_every_configuration_is_tuned_but_those_of_batched_products() -> None:
    tuned = {(case.kernel, case.variant) for case in cases() if case.vary}
    assert {key[:2] for key in TILES} - tuned == {("scaled_mm", sums) for sums in ("fast", "split", "blocks")}


def test_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["tune"]) == 1
    assert "Expected a GPU that torch can use, got none" in capsys.readouterr().err
