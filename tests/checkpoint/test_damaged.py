"""Files that are no files of `save`, or are no longer what they were: each is one clear error."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors_bytes

import scoped_fn as sf
from scoped_fn._checkpoint.header import BLANK, DIGEST_AT, MAX_HEADER_BYTES, START
from tests.checkpoint.files import forge_bytes, forge_header, tensor_entry
from tests.state.whole import whole_state

METADATA = {"schema": "1", "document": '{"tensor":"a"}'}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "run"
    sf.save({"state": whole_state(), "params": {"weight": torch.ones(4)}}, path)
    return path.read_bytes()


def refusal(path: Path) -> str:
    """The words in which a file is refused; one form for all."""
    with pytest.raises(sf.CheckpointError) as error:
        sf.load(path)
    text = str(error.value)
    assert re.fullmatch(r"Expected .+, got .+ in '.+'\. [A-Z].+\.", text, re.DOTALL), text
    assert len(text) < 600
    return text


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return refusal(path)


def header_length(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")


# Other files.


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.folder,)


def test_pickles_are_refused_and_not_run(tmp_path: Path, content: bytes) -> None:
    folder, path = tmp_path / "made", tmp_path / "file"
    payload = pickle.dumps(Payload(folder))
    saved = io.BytesIO()
    torch.save({"a": Payload(folder)}, saved)
    assert "got a pickle" in refused(path, payload)
    assert "got a zip file, as torch.save makes" in refused(path, saved.getvalue())
    assert "digest" in refused(path, content[:-8] + payload)
    start = len(START).to_bytes(8, "little") + START + payload
    assert "a header" in refused(path, start)
    assert not folder.exists()
    pickle.loads(payload)
    assert folder.exists()  # the payload works


def test_files_of_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("a", "b")
    others = {
        b"": "got an empty file",
        b"\0": "got one that begins with",
        b"Once upon a time there was a checkpoint. " * 9: r"got one that begins with b'Once upon a time the'",
        archive.getvalue(): "got a zip file",
        bytes(1000): "got one that begins with",
        safetensors_bytes({"a": torch.ones(2)}): "got one that begins with",
        b"x" + content: "got one that begins with",
    }
    for other, words in others.items():
        text = refused(path, other)
        assert text.startswith("Expected a file that sf.save made, got ")
        assert words in text


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        assert refusal(path).startswith(f"Expected a file, got a folder, pipe or device in '{path}'.")
    with pytest.raises(FileNotFoundError, match="No such file"):
        sf.load(tmp_path / "missing")
    for other in (None, 3):
        with pytest.raises(TypeError):
            sf.load(other)  # type: ignore[arg-type]


# Damage.


def test_a_truncated_file(tmp_path: Path, content: bytes) -> None:
    end = 8 + header_length(content)
    places = {0, 1, 7, 8, 9, DIGEST_AT - 1, DIGEST_AT, DIGEST_AT + 1, DIGEST_AT + 63, DIGEST_AT + 64, end - 1, end}
    places |= {end + 1, len(content) - 1, *range(0, len(content), 97)}
    for place in sorted(places):
        refused(tmp_path / "file", content[:place])
    for extra in (b"\0", b" " * 8, content):
        assert "digest" in refused(tmp_path / "file", content + extra)


def test_a_flipped_bit_anywhere(tmp_path: Path, content: bytes) -> None:
    """Every byte of the length, of the start and of the digest, and every seventh of the rest."""
    end = 8 + header_length(content)
    places = [*range(DIGEST_AT + 80), *range(DIGEST_AT + 80, len(content), 7), *range(end - 8, end + 8)]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        refused(tmp_path / "file", bytes(damaged))


@pytest.mark.parametrize("region", ["document", "data"])
def test_damage_is_called_damage(region: str, tmp_path: Path, content: bytes) -> None:
    end = 8 + header_length(content)
    place = content.index(b"encoder") if region == "document" else end + 3
    damaged = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    text = refused(tmp_path / "file", damaged)
    assert "contents with the digest" in text
    assert "Use another copy" in text


def test_two_tensors_that_changed_places(tmp_path: Path) -> None:
    path = tmp_path / "file"
    sf.save([torch.zeros(2), torch.ones(2)], path)
    content = path.read_bytes()
    assert "digest" in refused(path, content[:-16] + content[-8:] + content[-16:-8])


# Claims.


def test_a_length_beyond_the_file_or_the_cap(tmp_path: Path, content: bytes) -> None:
    for length in (len(content), len(content) - 7, MAX_HEADER_BYTES + 1, 2**30, 2**63, 2**64 - 1):
        text = refused(tmp_path / "file", length.to_bytes(8, "little") + content[8:])
        assert f"got one of {length}" in text
    for length in (0, 1, DIGEST_AT - 8, DIGEST_AT + 55):
        assert "a header with a digest" in refused(tmp_path / "file", length.to_bytes(8, "little") + content[8:])


def test_a_claim_of_a_gigabyte_takes_no_memory(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes((2**30).to_bytes(8, "little") + content[8:])
    with path.open("r+b") as file:
        file.truncate(2**31)  # it takes no room, and the claim is within it
    tracemalloc.start()
    refusal(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    forge_header(path, METADATA, {"a": tensor_entry(shape=(2**28,), offsets=(0, 2**30))}, bytes(8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "tensors of 8 bytes in all, got 1073741824" in refusal(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_reading_takes_little_more_memory_than_the_tensors(tmp_path: Path) -> None:
    """In a process of its own, as a process never gives its peak back."""
    script = f"""
import resource, torch, scoped_fn as sf
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path, big = {str(tmp_path / "big")!r}, [torch.zeros(2**24), torch.zeros(2**12, 2**12).T]
big += [torch.zeros(2**12, 2**13)[:, ::2]] * 3
sf.save([torch.ones(1)], path), sf.load(path)
before = peak()
sf.save(big, path)
saving = peak() - before
del big
before = peak()
sf.load(path)
print(saving, peak() - before)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    saving, loading = map(int, run.stdout.split())
    assert saving < 100_000  # one tensor at a time, of those that are not contiguous: 64 MiB
    assert loading < 100_000  # what was freed before, and the pieces it is read in


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"a": 3}, "dtype, shape and place of 'a'"),
        ({"a": {"dtype": "F32"}}, "dtype, shape and place of 'a'"),
        ({"a": {**tensor_entry(), "more": 1}}, "dtype, shape and place of 'a'"),
        ({"a": tensor_entry(dtype="F4")}, "a dtype of 'a' that is known"),
        ({"a": tensor_entry(dtype=["F32"])}, "a dtype of 'a' that is known"),
        ({"a": tensor_entry(shape=[-2])}, "shape and place of 'a'"),
        ({"a": tensor_entry(shape=[True, 2])}, "shape and place of 'a'"),
        ({"a": tensor_entry(shape=[2.0])}, "shape and place of 'a'"),
        ({"a": tensor_entry(shape=[2**70])}, "shape and place of 'a'"),
        ({"a": tensor_entry(shape="2")}, "shape and place of 'a'"),
        ({"a": tensor_entry(shape=[1] * 65)}, "shape and place of 'a'"),
        ({"a": tensor_entry(offsets=[0, 8, 8])}, "shape and place of 'a'"),
        ({"a": tensor_entry(offsets=[8, 0])}, "8 bytes for 'a', got -8"),
        ({"a": tensor_entry(offsets=[1, 9])}, "bytes of 'a' from 0 on, got 1"),
        ({"a": tensor_entry(shape=[3])}, "12 bytes for 'a', got 8"),
        ({"a": tensor_entry(shape=[0], offsets=[0, 0])}, "tensors of 8 bytes in all, got 0"),
        ({"a": tensor_entry(), "b": tensor_entry()}, "bytes of 'b' from 8 on, got 0"),
        ({"a": tensor_entry(offsets=[0, 8]), "b": tensor_entry(offsets=[4, 12])}, "bytes of 'b' from 8 on, got 4"),
        ({"a": tensor_entry(shape=[0, 2**61, 2**61], offsets=[0, 0]), "b": tensor_entry()}, "there is memory for"),
    ],
)  # fmt: skip
def test_entries_that_cannot_be(entries: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(forge_header(tmp_path / "file", METADATA, entries, bytes(8)))


def test_a_damaged_entry_is_called_damage(tmp_path: Path) -> None:
    path = tmp_path / "file"
    sf.save(torch.ones(2, 3), path)
    content = path.read_bytes().replace(b'"F32","shape":[2,3]', b'"F32","shape":[2,9]')
    assert "digest" in refused(path, content)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"a": "b"}, "metadata with a schema"),
        ({"schema": 1}, "metadata of texts"),
        ({"schema": "one"}, "the number of a schema, got 'one'"),
        ({"schema": "-1"}, "the number of a schema"),
        ({"schema": "1" * 5000}, "the number of a schema"),
        ({"schema": "\u00b2"}, "the number of a schema"),
        ({"schema": "0", "document": "1"}, "a schema that can be brought to 1, got 0"),
        ({"schema": "1"}, "metadata with document, producer, schema, sha256"),
        ({**METADATA, "more": "1"}, "metadata with document, producer, schema, sha256"),
        ({"schema": "1", "document": "{"}, "a document in JSON"),
        ({"schema": "1", "document": "NaN"}, "a document in JSON, got 'NaN, which is no JSON'"),
        ({"schema": "1", "document": '{"a":1,"a":2}'}, "a document in JSON, got 'a key that is there twice'"),
        ({"schema": "1", "document": "[" * 300 + "]" * 300}, "JSON that is not deeper"),
        ({"schema": "1", "document": "[" * 100_000}, "a document in JSON"),
        ({"schema": "1", "document": "9" * 5000}, "a document in JSON"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(forge_header(tmp_path / "file", metadata, {}, b""))


@pytest.mark.parametrize(
    "rest", [b"", b"}", b'"}', b'","schema":"1","document":"1"}', b'","schema":"1"},"a":{},"a":{}}', b'"}}x', b"\xff"]
)
def test_a_header_that_is_no_json(rest: bytes, tmp_path: Path) -> None:
    refusal(forge_bytes(tmp_path / "file", START + BLANK + rest, b""))


def test_a_newer_schema(tmp_path: Path) -> None:
    metadata = {"schema": "2", "documents": json.dumps(["who knows"]), "digest": "elsewhere"}
    text = refusal(forge_header(tmp_path / "file", metadata, {"a": "of another form"}, bytes(3)))
    assert text == f"Expected schema at most 1, got 2 in '{tmp_path / 'file'}'. Update scoped_fn."


def test_the_length_is_part_of_the_digest(tmp_path: Path, content: bytes) -> None:
    """Spaces at the end of the header moved to the data: every part is well, and the whole is not."""
    sf.save([1], tmp_path / "file")
    made = (tmp_path / "file").read_bytes()
    length = header_length(made)
    assert made.endswith(b" ")
    text = refused(tmp_path / "file", struct.pack("<Q", length - 1) + made[8:])
    assert "digest" in text
