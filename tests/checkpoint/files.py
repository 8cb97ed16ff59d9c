"""Files that are forged: with a right digest, and anything else wrong."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from scoped_fn._checkpoint.atomic import write_file
from scoped_fn._checkpoint.encode import encode
from scoped_fn._checkpoint.header import BLANK, DIGEST_AT, START, header_bytes, ordered
from scoped_fn._checkpoint.memory import bytes_of


def document_of(value: Any) -> Any:
    """The JSON of a value, to change."""
    return copy.deepcopy(json.loads(json.dumps(encode(value)[0])))


def forge(path: Path, document: Any, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Writes a file of any document and tensors, with the digest that belongs to it."""
    tensors = ordered(tensors)
    write_file(path, [header_bytes(document, tensors), *(bytes_of(each.contiguous()) for each in tensors.values())])
    return path


def forge_value(path: Path, value: Any, *places: tuple[tuple[Any, ...], Any], **tensors: torch.Tensor) -> Path:
    """Writes the file of a value with changes: at each place of its document something else."""
    document, found = encode(value)
    document = document_of(value)
    for place, new in places:
        at = document
        for part in place[:-1]:
            at = at[part]
        if new is None and isinstance(at, dict):
            del at[place[-1]]
        else:
            at[place[-1]] = new
    return forge(path, document, {**found, **tensors})


def forge_header(path: Path, metadata: Mapping[str, Any], entries: Mapping[str, Any], data: bytes) -> Path:
    """Writes a file with any header after the digest, and the digest that belongs to it."""
    rest = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    return forge_bytes(path, START + BLANK + b'",' + rest.removeprefix(b'{"__metadata__":{'), data)


def forge_bytes(path: Path, header: bytes, data: bytes) -> Path:
    """Writes a file with any bytes as a header, and their digest where a digest belongs."""
    content = len(header).to_bytes(8, "little") + header + data
    digest = hashlib.sha256(content).hexdigest().encode()
    path.write_bytes(content[:DIGEST_AT] + digest + content[DIGEST_AT + 64 :])
    return path


def tensor_entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    """What a header says of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}
