"""Files that change in one move or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress

from scoped_fn._checkpoint.header import DIGEST_AT

Piece = bytes | memoryview


def check_path(path: str | os.PathLike[str]) -> str:
    """Returns a path as text; raises `TypeError` for anything else."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"Expected a path, got a {type(path).__name__}. Write sf.save(value, path), sf.load(path).")
    return os.fsdecode(path)


def write_file(path: str | os.PathLike[str], pieces: Iterable[Piece]) -> None:
    """Writes pieces to a file, and their SHA-256 in hexadecimal digits over the first piece's zeros.

    At every moment the path has what it had before or the whole new file: pieces go to an unfinished file beside it,
    which takes its place once it is on the disk. A link stays a link, and what it leads to is replaced; a file that is
    replaced passes on its permissions.

    Args:
        path: Where to.
        pieces: In order; each is asked for once the one before it is written.

    Raises:
        OSError: The file cannot be written. The unfinished one is removed.
    """
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise IsADirectoryError(f"Expected a file to write to, got the folder '{os.fspath(path)}'. Add a file's name.")
    mode = os.stat(target).st_mode if os.path.exists(target) else None
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(f"Expected a file to write to, got a pipe or device, '{os.fspath(path)}'. Give another path.")
    folder, name = os.path.split(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"Expected a folder that exists, got '{folder}'. Make it first.")
    # The name is cut: with what is added it must not be longer than names may be.
    start = os.fsdecode(os.fsencode(name)[:60])
    unfinished = os.path.join(folder, f".{start}.{secrets.token_hex(8)}.unfinished")
    try:
        _write_unfinished(unfinished, pieces, None if mode is None else stat.S_IMODE(mode))
        os.replace(unfinished, target)
    except FileExistsError:  # somebody else's file
        raise
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            os.unlink(unfinished)
        raise
    _sync_folder(folder)


def _write_unfinished(path: str, pieces: Iterable[Piece], mode: int | None) -> None:
    digest = hashlib.sha256()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o666 if mode is None else mode & 0o600)
    try:
        if mode is not None:
            with suppress(PermissionError):  # some mounts know no modes
                os.chmod(path, mode)
        for given in pieces:
            piece = bytes(given)  # what is hashed is what is written, also if a thread changes the tensor meanwhile
            digest.update(piece)
            _write_all(descriptor, piece)
        os.lseek(descriptor, DIGEST_AT, os.SEEK_SET)
        _write_all(descriptor, digest.hexdigest().encode("ascii"))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, piece: Piece) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_folder(folder: str) -> None:
    """Has the folder itself written to the disk: without it a new name may be lost when the power fails."""
    if not hasattr(os, "O_DIRECTORY"):  # not on Windows
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # one may write into a folder that one may not read
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
