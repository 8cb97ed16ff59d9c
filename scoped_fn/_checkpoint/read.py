"""A file as bytes: what has to hold before anything in it is believed, and the tensors."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from scoped_fn._checkpoint.header import (
    BLANK,
    DIGEST_AT,
    DIGEST_CHARACTERS,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    START,
    Entry,
    Header,
    entries_of,
    parse_header,
)
from scoped_fn._checkpoint.memory import bytes_of
from scoped_fn._checkpoint.unfit import Unfit, demand, refusal, shown

PIECE_BYTES = 1 << 22
DAMAGED = "The file was changed after it was saved, or only a part of it was copied. Use another copy."
KNOWN_STARTS = ((b"PK\x03\x04", "a zip file, as torch.save makes"), (b"\x80", "a pickle"))


@dataclass(frozen=True)
class Raw:
    """A file whose digest is right.

    Attributes:
        schema: Version of the schema of its document.
        text: The document, JSON yet to be parsed.
        tensors: The tensors in their stored forms, by name, on the CPU.
    """

    schema: int
    text: str
    tensors: Mapping[str, torch.Tensor]


def read_raw(path: str | os.PathLike[str], *, newest: int) -> Raw:
    """Returns what a file holds, once its digest is found right.

    Args:
        path: The file.
        newest: The newest schema that is known.

    Raises:
        Unfit: It is no file of `save`, of a newer schema, or damaged.
        OSError: It cannot be opened or read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # asked first: to open a pipe may take for ever
        raise Unfit("a file", "a folder, pipe or device")
    with open(path, "rb", buffering=0) as file:
        return _read_open(file, os.fstat(file.fileno()).st_size, newest)


def is_saved(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file begins as those of `save` do; raises `OSError` if it cannot be opened."""
    with open(path, "rb") as file:
        return file.read(LENGTH_BYTES + len(START))[LENGTH_BYTES:] == START


def _read_open(file: IO[bytes], size: int, newest: int) -> Raw:
    length, start = _read_start(file, size)
    body = start + _read_exactly(file, length - len(start))
    header = parse_header(body, newest=newest)
    if header.schema > newest:
        raise refusal(f"schema at most {newest}", header.schema, "Update scoped_fn.")
    digest = hashlib.sha256(length.to_bytes(LENGTH_BYTES, "little"))
    place = DIGEST_AT - LENGTH_BYTES
    digest.update(body[:place] + BLANK + body[place + DIGEST_CHARACTERS :])
    tensors = _read_tensors(file, header, size - LENGTH_BYTES - length, digest.update, lambda: _check(header, digest))
    return Raw(header.schema, header.text, tensors)


def _read_start(file: IO[bytes], size: int) -> tuple[int, bytes]:
    """Returns the length of the header and the first bytes of it, once they are those of a file of `save`."""
    first = _read_exactly(file, min(size, LENGTH_BYTES + len(START)))
    if first[LENGTH_BYTES:] != START:
        kinds = [kind for start, kind in KNOWN_STARTS if first.startswith(start)]
        got = kinds[0] if kinds else f"one that begins with {shown(first[:20])}" if first else "an empty file"
        raise Unfit("a file that sf.save made", got)
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        within = f"a header of at most {min(MAX_HEADER_BYTES, size - LENGTH_BYTES)} bytes"
        raise Unfit(within, f"one of {length}", DAMAGED)
    demand(length >= len(START) + DIGEST_CHARACTERS, "a header with a digest", f"{length} bytes")
    return length, first[LENGTH_BYTES:]


def _read_tensors(
    file: IO[bytes], header: Header, data_bytes: int, update: Callable[[Any], None], check: Callable[[], None]
) -> dict[str, torch.Tensor]:
    try:
        entries = entries_of(header, data_bytes)
    except Unfit:
        _pass_over(file, update)
        check()  # if the file is damaged, that is what is said
        raise
    tensors = {name: _read_tensor(file, entry, update) for name, entry in entries.items()}
    check()
    return tensors


def _read_tensor(file: IO[bytes], entry: Entry, update: Callable[[Any], None]) -> torch.Tensor:
    try:
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    except RuntimeError as error:
        raise Unfit("a tensor that there is memory for", shown(str(error))) from None
    rest = bytes_of(tensor)
    while rest:
        count = file.readinto(rest[:PIECE_BYTES])  # type: ignore[attr-defined]
        demand(count > 0, "a file that stays as it is while it is read", "a shorter one")
        update(rest[:count])
        rest = rest[count:]
    return tensor


def _pass_over(file: IO[bytes], update: Callable[[Any], None]) -> None:
    while piece := file.read(PIECE_BYTES):
        update(piece)


def _read_exactly(file: IO[bytes], count: int) -> bytes:
    pieces, left = [], count
    while left:
        piece = file.read(left)
        demand(bool(piece), "a file that stays as it is while it is read", "a shorter one")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _check(header: Header, digest: Any) -> None:
    if header.digest != digest.hexdigest():
        raise Unfit(f"contents with the digest {header.digest[:16]}...", f"{digest.hexdigest()[:16]}...", DAMAGED)
