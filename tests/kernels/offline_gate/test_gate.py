"""What each kernel compiles to, with the configurations that it is launched with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from unittest.mock import patch

import pytest

from scoped_fn.kernels import _tiles
from scoped_fn.kernels.gpu import matmul, quantize
from tests.kernels.offline import Launch, Report, compile_launch, recorded_launches
from tests.kernels.offline_gate.cases import CASES, E4M3, Case

ARCHS = ("cuda:90", "cuda:100", "cuda:103", "cuda:89", "cuda:120", "hip:gfx942", "hip:gfx950")
# What has the tiles of another architecture: only products come near the limits there.
LIKE_ANOTHER = ("cuda:103", "cuda:120")
SHARED = {
    "cuda:90": 232448,
    "cuda:100": 232448,
    "cuda:103": 232448,
    "cuda:89": 101376,
    "cuda:120": 101376,
    "hip:gfx942": 65536,
    "hip:gfx950": 163840,
}
TENSOR_CORES = {
    "cuda:90": r"wgmma\.mma_async\S*\.e[45]m[32]\.e[45]m[32]",
    "cuda:100": r"tcgen05\.mma\S*kind::f8f6f4",
    "cuda:103": r"tcgen05\.mma\S*kind::f8f6f4",
    "cuda:89": r"mma\.sync\S*\.e[45]m[32]\.e[45]m[32]",
    "cuda:120": r"mma\.sync\S*\.e[45]m[32]\.e[45]m[32]",
    "hip:gfx942": "v_mfma",
    "hip:gfx950": "v_mfma",
}


# Not every case for every GPU, to keep the gate short.
PAIRS = [
    (case, arch)
    for case in CASES
    for arch in ARCHS
    if arch == "cuda:90" or (case.everywhere and (arch not in LIKE_ANOTHER or case.module is matmul))
]


@pytest.mark.parametrize(("case", "arch"), PAIRS, ids=[f"{arch}, {case.name}" for case, arch in PAIRS])
def test_compiled(case: Case, arch: str) -> None:
    with recorded_launches(case.module, arch) as launches:
        case.call()
    assert launches
    for launch in launches:
        report = compile_launch(launch, arch)
        print(f"{arch}, {case.name}: {launch.kernel.__name__}, {report.figures()}")
        assert report.spilled == 0, report.figures()
        assert report.shared <= SHARED[arch]
        check_instructions(case, launch, report, arch)


def check_instructions(case: Case, launch: Launch, report: Report, arch: str) -> None:
    name = launch.kernel.__name__
    if name.startswith("scaled_mm"):
        assert re.search(TENSOR_CORES[arch], report.text)
    if arch.startswith("cuda"):
        # ptxas says so where it makes tensor cores wait: C7510 and its neighbors.
        assert not re.search(r"\(C75\d\d\)|Potential Performance Loss", report.log), report.log
        assert not re.search(r"\b(?:atom|red)\.\S*acq_rel", report.text)
        if name == "scaled_mm_tma_kernel":
            assert "cp.async.bulk.tensor.2d.shared" in report.text
            assert "cp.async.bulk.tensor.2d.global" in report.text
        if case.fp8 and name != "amax_kernel":
            source = "f16x2" if arch == "cuda:89" else "f32"
            assert f"cvt.rn.satfinite.{'e4m3' if case.fp8 == E4M3 else 'e5m2'}x2.{source}" in report.text
    if arch == "cuda:90":
        check_hopper(case, launch, report)
    if arch in ("cuda:89", "cuda:120") and name == "scaled_mm_kernel" and launch.arguments["SPLIT"]:
        # Else the sum would stay in the tensor cores, which keep few bits here too.
        options = launch.arguments
        held = options["BLOCK_M"] * options["BLOCK_N"] // (32 * launch.options["num_warps"])
        single, pairs = (len(re.findall(rf"\badd(?:\.rn)?\.{kind}\b", report.text)) for kind in ("f32", "f32x2"))
        assert single + 2 * pairs >= held


def check_hopper(case: Case, launch: Launch, report: Report) -> None:
    name, options = launch.kernel.__name__, launch.arguments
    if name.startswith("scaled_mm"):
        assert report.count(r"\bQGMMA\b")
        # Sums of their own are added in float32, an addition for each element that a thread holds. Others are not.
        held = options["BLOCK_M"] * options["BLOCK_N"] // (32 * launch.options["num_warps"])
        biases = 0 if options["bias_ptr"] is None else held
        additions = report.count(r"\bFADD\b")
        if not options["BLOCKED"]:
            assert (additions >= held) if options["SPLIT"] else (additions <= biases)
    if name == "scaled_mm_tma_kernel":
        assert report.count(r"\bUTMALDG\b")
        assert report.count(r"\bUTMASTG\b")
    if case.wide:
        assert report.count(r"\bLDG\S*\.128\b")
        # Neither the matrix nor its transpose goes out in smaller pieces; exponents may.
        assert name == "amax_kernel" or report.count(r"\bSTG\S*\.128\b") >= 2
        assert "mx" in name or not report.count(r"\bSTG\S*\.U8\b")


def test_every_tile_of_the_table_is_compiled() -> None:
    used = set()

    class Watched(dict[tuple[str, str, str, str], _tiles.Tile]):
        def get(self, key, default=None):
            if key in self:
                used.add(key)
            return super().get(key, default)

    table: Mapping[tuple[str, str, str, str], _tiles.Tile] = Watched(_tiles.TILES)
    with patch.object(_tiles, "TILES", table):
        for case, arch in PAIRS:
            with recorded_launches(case.module, arch):
                case.call()
    assert set(_tiles.TILES) - used == set()


def test_a_spill_is_seen() -> None:
    """The gate's own check: 64 float32 numbers a thread twice over do not fit."""
    (case,) = [case for case in CASES if case.name == "quantize, transpose"]
    too_large = {key: _tiles.Tile(block_m=256, block_k=256, warps=4) for key in _tiles.TILES}
    with patch.object(_tiles, "TILES", too_large), recorded_launches(quantize, "cuda:90") as launches:
        case.call()
    assert compile_launch(launches[0], "cuda:90").spilled > 0
