"""Files are whole for every reader of the format: aligned, named in text, written to the last byte."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import scoped_fn as sf
from scoped_fn._checkpoint import atomic
from tests.checkpoint.values import exact

MIXED = [torch.ones(3, dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16), torch.arange(3.0).double()]


class FewBytes:
    """`os`, which writes at most seven bytes in a call, as it may."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @staticmethod
    def write(descriptor: int, content: Any) -> int:
        return os.write(descriptor, bytes(content[:7]))


def test_a_system_that_writes_a_part_of_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sf.save(MIXED, tmp_path / "at once")
    monkeypatch.setattr(atomic, "os", FewBytes())
    sf.save(MIXED, tmp_path / "in parts")
    assert (tmp_path / "in parts").read_bytes() == (tmp_path / "at once").read_bytes()


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    sf.save(MIXED, tmp_path / "mixed")
    content = (tmp_path / "mixed").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    sizes = {"U8": 1, "BF16": 2, "F64": 8}
    entries = {name: each for name, each in json.loads(content[8 : 8 + length]).items() if name != "__metadata__"}
    assert len(entries) == 3
    for each in entries.values():
        assert each["data_offsets"][0] % sizes[each["dtype"]] == 0
    with safe_open(tmp_path / "mixed", "pt") as file:
        assert exact([file.get_tensor(str(index)) for index in range(3)]) == exact(MIXED)


def test_names_that_are_no_text(tmp_path: Path) -> None:
    value = {"\ud800": torch.ones(1), "a\nb": torch.ones(2), "\\ud800": torch.ones(3), "\u00e4": torch.ones(4)}
    sf.save(value, tmp_path / "names")
    assert exact(sf.load(tmp_path / "names")) == exact(value)
    with safe_open(tmp_path / "names", "pt") as file:
        assert sorted(file.keys()) == ["\\ud800", "\\ud800#2", "a\nb", "\u00e4"]
