"""The table of launch configurations."""

import ast
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from scoped_fn.kernels import _tiles
from scoped_fn.kernels._tiles import TILES, Tile, tile_for

SOURCE = Path(_tiles.__file__).read_text()


def test_the_table_stands_between_its_markers() -> None:
    begin, end = "# The table begins.\n", "# The table ends.\n"
    assert (SOURCE.count(begin), SOURCE.count(end)) == (1, 1)
    (statement,) = ast.parse(SOURCE.split(begin)[1].split(end)[0]).body
    assert isinstance(statement, ast.AnnAssign)
    assert ast.unparse(statement.target) == "TILES"


@pytest.mark.parametrize("key", TILES, ids="-".join)
def test_what_triton_asks_of_a_tile(key: tuple[str, str, str, str]) -> None:
    tile = TILES[key]
    for size in (tile.block_m, tile.block_n, tile.block_k, tile.warps, tile.epilogue):
        assert size.bit_count() == 1
    assert tile.warps <= 16
    kernel, variant, _, _ = key
    if kernel == "scaled_mm" and not variant.startswith("fast"):
        assert tile.block_k == 128
    if kernel == "quantize_blocks":
        assert tile.block_k == 128
        assert tile.block_m == 128 or variant == "1"
    if kernel == "quantize_mx":
        assert tile.block_k % 32 == 0
        assert tile.block_m % 32 == 0
    if kernel == "dequantize":
        assert tile.block_k >= 128


def test_the_most_special_entry_is_taken() -> None:
    large, low = TILES["scaled_mm", "fast tma", "", ""], TILES["scaled_mm", "fast tma", "low", ""]
    assert tile_for("scaled_mm", 8192, 8192, variant="fast tma", arch="cuda:90") == large
    assert tile_for("scaled_mm", 64, 8192, variant="fast tma", arch="cuda:90") == low
    special = TILES["scaled_mm", "fast tma", "", "cuda:100"]
    assert tile_for("scaled_mm", 8192, 8192, variant="fast tma", arch="cuda:100") == special


@pytest.mark.parametrize(("columns", "block_k"), [(1, 128), (128, 128), (129, 256), (5000, 8192), (8192, 8192)])
def test_a_row_of_a_norm_fits(columns: int, block_k: int) -> None:
    assert tile_for("norm_quantize", 100, columns).block_k == block_k


def test_a_long_row_comes_in_chunks() -> None:
    assert tile_for("norm_quantize", 100, 8193).block_k < 8193


def test_a_kernel_without_tiles() -> None:
    text = r"Expected a tile for 'no_such', got none for variant ''\. Add one to TILES\."
    with pytest.raises(LookupError, match=text):
        tile_for("no_such", 1, 1)


def test_counts() -> None:
    tile = Tile(block_m=16, block_k=128)
    assert tile.count(3, 17, 256) == 12
    assert tile.divides(32, 256)
    assert not tile.divides(33, 256)
    assert not tile.divides(32, 255)


def test_a_tile_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Tile().warps = 8  # type: ignore[misc]
