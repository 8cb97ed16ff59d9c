"""Text as bytes: where it comes from, and how it is cut into batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scoped_fn.demo.errors import UsageError


@dataclass(frozen=True)
class Corpus:
    """A text in two parts.

    Attributes:
        training: uint8 (N,), the first nine tenths of the text.
        validation: uint8 (M,), the rest.
    """

    training: Tensor
    validation: Tensor


def read_corpus(path: Path | None, *, context: int) -> Corpus:
    """Returns the bytes of a file, or of Python's own manual where `path` is None.

    Args:
        path: A text file of any encoding.
        context: The length of one training example; each part must hold at least one.

    Raises:
        UsageError: The file cannot be read or holds too little text.
    """
    content = _python_manual() if path is None else _read_file(path)
    boundary = len(content) * 9 // 10
    least = 10 * context + 1  # then the validation part holds one example and its last target
    if len(content) < least:
        where = "" if path is None else f" in '{path}'"
        raise UsageError(
            f"Expected at least {least} bytes of text, got {len(content)}{where}. Give a longer --text file."
        )
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return Corpus(data[:boundary], data[boundary:])


def training_batch(corpus: Corpus, *, seed: int, step: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens and targets of one training step, each int64 (B, T); the same for the same seed and step."""
    # torch's CPU generator keeps the low 32 bits of a seed, so seed and step have to be mixed within them.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)
    last = len(corpus.training) - context
    return _windows(corpus.training, torch.randint(last, (batch,), generator=generator), context)


def validation_batches(corpus: Corpus, *, count: int, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """Returns `count` batches spread evenly over the validation part."""
    last = len(corpus.validation) - context - 1
    starts = torch.linspace(0, last, count * batch).long().view(count, batch)
    return [_windows(corpus.validation, chunk, context) for chunk in starts]


def _windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = data.unfold(0, context + 1, 1)[starts].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _python_manual() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError("Expected Python's pydoc_data, got a Python without it. Give a --text file.") from None
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    # A fifth of it says again what another topic says. Each paragraph once: none is both trained on and validated on.
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"Expected a readable text file, got '{path}': {error.strerror}. Check --text.") from None
