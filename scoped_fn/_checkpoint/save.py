"""`save`: a value to a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from scoped_fn._checkpoint.atomic import Piece, check_path, write_file
from scoped_fn._checkpoint.decode import decode
from scoped_fn._checkpoint.encode import encode
from scoped_fn._checkpoint.header import header_bytes, ordered
from scoped_fn._checkpoint.memory import bytes_of
from scoped_fn._checkpoint.unfit import Unfit
from scoped_fn._errors import CheckpointError
from scoped_fn._torch.levels import on_values

PIECE_BYTES = 1 << 24


def save(value: Any, path: str | os.PathLike[str]) -> None:
    """Writes a state, or a tree of states, tensors and plain data, to one file.

    The file is in the format of safetensors, with what is no tensor as JSON in its header; nothing is pickled. It
    changes in one move: whatever happens, `path` has the old file or the whole new one.

    Args:
        value: A `CompilerState`, a tensor, None, bool, int, float, complex, str, bytes, dtype or device, or lists,
            tuples, dicts and `OrderedDict`s of these, at most 64 deep. Tensors are saved by their values, of any dtype
            and layout in memory, each by itself where several share memory; `requires_grad` is not saved.
        path: Where to. A file that is there is replaced.

    Raises:
        CheckpointError: There is something else in the value, such as a recipe that holds a function.
        TypeError: The path is none.
        OSError: The file cannot be written.

    Example:
        >>> import scoped_fn as sf
        >>> state = sf.init_state(key=7)
        >>> save({"state": state, "params": {"weight": torch.ones(2)}, "step": 3}, "run.safetensors")
        >>> sf.load("run.safetensors")["state"]
        CompilerState(key=(0, 7), next_token=0)
    """
    name = check_path(path)
    with on_values():
        try:
            document, tensors = encode(value)
            decode(document, tensors)  # what a file holds can be loaded: the same checks, before it is written
            tensors = ordered(tensors)
            header = header_bytes(document, tensors)
        except Unfit as unfit:
            raise CheckpointError(f"{unfit} {unfit.advice or 'Convert it, or leave it out.'}") from None
        write_file(name, _pieces(header, tensors))


def _pieces(header: bytes, tensors: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    yield header
    for tensor in tensors.values():
        yield from _pieces_of(tensor)


def _pieces_of(tensor: torch.Tensor) -> Iterator[Piece]:
    dense = tensor.cpu().contiguous()  # gone with this function, before there is one of the next tensor
    memory = bytes_of(dense)
    for begin in range(0, len(memory), PIECE_BYTES):
        yield memory[begin : begin + PIECE_BYTES]
