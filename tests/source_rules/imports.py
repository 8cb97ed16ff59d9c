"""Who may import whom."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass

from tests.source_rules.names import has_private_part, imported_names
from tests.source_rules.rooms import ROOMS


@dataclass(frozen=True)
class Imports:
    """What a room may import: of ours, from outside, and both again where the import runs only when it is needed."""

    rooms: tuple[str, ...]
    outside: tuple[str, ...]
    lazy_rooms: tuple[str, ...] = ()
    lazy_outside: tuple[str, ...] = ()


ALLOWED = {
    "kernels": Imports(rooms=(), outside=("torch", "triton")),
    "state": Imports(rooms=(), outside=("torch", "optree")),
    "scoped_fn": Imports(rooms=("state", "kernels"), outside=("torch", "optree")),
    "interop": Imports(
        rooms=("state",), outside=("torch", "optree"), lazy_rooms=("scoped_fn",), lazy_outside=("jax", "numpy")
    ),
}
# Only what talks to a person may draw.
DRAWING = ("rich", "matplotlib")
# What replaces attributes of others for a while is for tests.
FOR_TESTS = ("unittest", "doctest")
MAY_DRAW = re.compile(r"scoped_fn/(demo/.*|_?cli\.py|_?doctor\.py)")


def import_rule(path: str, text: str) -> list[str]:
    """A room imports only what the table in CONTRIBUTING.md allows it, and by absolute names."""
    allowed = ALLOWED[path.split("/")[0]]
    return [
        f"{path}:{line}: {complaint}"
        for line, name, lazy in imported_names(ast.parse(text))
        if (complaint := import_complaint(path, allowed, name, lazy))
    ]


def import_complaint(path: str, allowed: Imports, name: str, lazy: bool) -> str | None:
    """What is wrong with a file's import of a dotted name, if anything is."""
    own, top = path.split("/")[0], name.split(".")[0]
    if top == "":
        return "a relative import"
    if top == "scoped_fn":
        other = room_of(name)
        if other == own or other in allowed.rooms:
            return None
        if not (lazy and other in allowed.lazy_rooms):
            return f"{own} may not import {other}{' here' if other in allowed.lazy_rooms else ''}, got {name}"
        return f"{own} may import public names of {other} only, got {name}" if has_private_part(name) else None
    outside = allowed.outside + (allowed.lazy_outside if lazy else ()) + (DRAWING if MAY_DRAW.fullmatch(path) else ())
    known = top in outside or (top in sys.stdlib_module_names and top not in FOR_TESTS)
    return None if known else f"{own} may not import {top} here"


def room_of(name: str) -> str:
    """The room that a dotted name of ours lives in."""
    rooms = {import_name: room for room, import_name in ROOMS.items()}
    return rooms.get(".".join(name.split(".")[:2]), "scoped_fn")
