"""The bytes before the data: a length, and JSON that says what the data is, in the format of safetensors.

The first entry of the JSON is metadata: who made the file, the SHA-256 of the whole file as it is with zeros in place
of the digest, the version of the schema, and the document. The digest is at the same place in every file, so that what
reads it needs to understand nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from scoped_fn._checkpoint.dtypes import BY_STORED_NAME, STORED
from scoped_fn._checkpoint.plain import Document
from scoped_fn._checkpoint.unfit import demand, refusal, shown

SCHEMA = 1
LENGTH_BYTES = 8
# Other readers of the format stop at 100 MB.
MAX_HEADER_BYTES = 100_000_000
MAX_PARTS = 4_000_000
START = b'{"__metadata__":{"producer":"scoped_fn","sha256":"'
DIGEST_CHARACTERS = 64
DIGEST_AT = LENGTH_BYTES + len(START)
BLANK = b"0" * DIGEST_CHARACTERS
METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its stored dtype, its shape, and where its bytes begin and end in the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What the JSON of a file says.

    Attributes:
        schema: Version of the schema.
        digest: What the file says its digest is.
        text: The document, JSON yet to be parsed.
        entries: The tensors by name, in the order of their bytes, or None before they were looked at.
    """

    schema: int
    digest: str
    text: str
    entries: Mapping[str, Any]


def ordered(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors in the order of the data: large elements first, so that each is aligned."""
    return dict(sorted(tensors.items(), key=lambda named: -named[1].element_size()))


def header_bytes(document: Document, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Returns length and JSON for tensors in the order of the data, zeros in place of the digest.

    Raises:
        Unfit: The JSON is too long.
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    metadata = {"schema": str(SCHEMA), "document": text}
    start = START + BLANK + b'",' + _json(metadata)[1:]
    entries, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {"dtype": STORED[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    body = start + (b"," + _json(entries)[1:] if entries else b"}")
    body += b" " * (-len(body) % 8)  # the data begins at a multiple of 8
    if len(body) > MAX_HEADER_BYTES:
        advice = "Save long lists of numbers as tensors."
        raise refusal(f"a description of at most {MAX_HEADER_BYTES} bytes", f"{len(body)} bytes", advice)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def parse_header(body: bytes, *, newest: int = SCHEMA) -> Header:
    """Returns what the JSON of a file says of producer, schema and digest; tensors are not looked at yet.

    Raises:
        Unfit: It is no JSON of a file of `save`.
    """
    demand(body.startswith(START), "a file that `save` made", body[:60])
    parsed = parsed_json(body, "JSON in the header")
    metadata = parsed.pop(METADATA, None) if isinstance(parsed, dict) else None
    wanted = {"producer", "sha256", "schema", "document"}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refusal("metadata of texts", metadata)
    demand("schema" in metadata, "metadata with a schema", list(metadata))
    schema = metadata["schema"]
    demand(schema.isascii() and schema.isdecimal() and len(schema) < 10, "the number of a schema", schema)
    if int(schema) <= newest:
        demand(metadata.keys() == wanted, f"metadata with {', '.join(sorted(wanted))}", list(metadata))
    return Header(int(schema), metadata.get("sha256", ""), metadata.get("document", ""), parsed)


def entries_of(header: Header, data_bytes: int) -> dict[str, Entry]:
    """Returns the tensors of a file by name, in the order of their bytes.

    Raises:
        Unfit: One is of no known form, or they leave gaps in the data, overlap or go beyond it.
    """
    found = {name: _entry(name, value) for name, value in header.entries.items()}
    entries = dict(sorted(found.items(), key=lambda named: (named[1].begin, named[1].end)))
    end = 0
    for name, entry in entries.items():
        demand(entry.begin == end, f"bytes of {shown(name)} from {end} on", entry.begin)
        end = entry.end
    demand(end == data_bytes, f"tensors of {data_bytes} bytes in all", end)
    return entries


def parsed_json(text: bytes | str, what: str) -> Any:
    """Returns parsed JSON without keys that repeat, numbers that JSON does not have, or too many parts for memory."""
    raw = text.encode() if isinstance(text, str) else text
    parts = sum(map(raw.count, (b"[", b"{", b",")))
    if parts > MAX_PARTS:  # each takes some 60 bytes of memory once it is parsed
        raise refusal(f"{what} of at most {MAX_PARTS} parts", f"{parts}")
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise refusal(what, str(error) or type(error).__name__) from None


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key that is there twice")
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is no JSON")


def _entry(name: str, value: Any) -> Entry:
    well = isinstance(value, dict) and value.keys() == {"dtype", "shape", "data_offsets"}
    demand(well, f"dtype, shape and place of {shown(name)}", value)
    shape, offsets = value["shape"], value["data_offsets"]
    numbers = isinstance(shape, list) and isinstance(offsets, list) and all(map(_is_size, [*shape, *offsets]))
    demand(numbers and len(offsets) == 2 and len(shape) <= 64, f"shape and place of {shown(name)}", value)
    dtype = value["dtype"]
    demand(isinstance(dtype, str) and dtype in BY_STORED_NAME, f"a dtype of {shown(name)} that is known", dtype)
    size = math.prod(shape) * BY_STORED_NAME[dtype].itemsize
    demand(offsets[1] - offsets[0] == size, f"{size} bytes for {shown(name)}", offsets[1] - offsets[0])
    return Entry(BY_STORED_NAME[dtype], tuple(shape), *offsets)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
