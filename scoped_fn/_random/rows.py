"""Keys under `vmap`: one key for all indices, or one for each."""

from __future__ import annotations

import torch
from torch import Tensor

from scoped_fn._errors import RandomOpError
from scoped_fn._torch.levels import VMAP, Level, at_level, in_chunks, innermost_level, levels
from scoped_fn._torch.wrapped import level_numbers
from scoped_fn.random import fold_in

APART = 0xFFFFFFFF  # no graph has so many draws, so no key of a row is one of those that a graph splits off


def rows_folded(words: Tensor) -> Tensor:
    """Returns a key for each index of every vmap level whose randomness is "different"; else the key itself.

    A key that a level maps already is left as it is.

    Args:
        words: int32 (2,), a key.

    Raises:
        RandomOpError: A level refuses random operations.
    """
    if torch.compiler.is_dynamo_compiling():
        _refuse_rows()
        return words
    if innermost_level() is None:
        return words
    for level in levels():
        if level.kind == VMAP and level.number not in level_numbers(words):
            words = _folded(words, level)
    return words


def _folded(words: Tensor, level: Level) -> Tensor:
    size, randomness = level.batch()
    if randomness == "error":
        raise RandomOpError(
            "Expected vmap of a function that draws random numbers to say how, got randomness='error'. "
            "Pass randomness='same' or 'different', or map over keys. For torch.func.hessian(f), which takes none, "
            "write jacfwd(jacrev(f), randomness='same')."
        )
    if randomness == "same":
        return words
    if in_chunks():
        raise RandomOpError(
            "Expected torch.func.vmap of a function that draws different numbers for each index without chunk_size, "
            "whose chunks would draw the same ones, got it with. Use sf.vmap, which keeps them apart."
        )
    with at_level(level):
        return row_key(words, level.add_batch(torch.arange(size, dtype=torch.int32, device=words.device)))


def row_key(words: Tensor, row: Tensor) -> Tensor:
    """Returns the key of an index: int32 (2,).

    Args:
        words: int32 (2,), the key that all indices share.
        row: int32 [], the index.
    """
    return fold_in(fold_in(words, APART), row)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _vmap_wants_rows() -> bool:
    """Returns whether a vmap level is active that is not to share one key; Dynamo asks it while it traces."""
    return any(level.kind == VMAP and level.batch()[1] != "same" for level in levels())


def _refuse_rows() -> None:
    """Raises inside a vmap that wants other numbers for each index, in code that Dynamo reads."""
    if _vmap_wants_rows():
        raise RandomOpError(
            "Expected a function that draws random numbers to be called inside vmap with randomness='same' where "
            "another function is traced, got another randomness. Map over keys, or map the outer function."
        )
