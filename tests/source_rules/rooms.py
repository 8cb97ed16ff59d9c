"""The rooms and their files."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ROOMS = {
    "scoped_fn": "scoped_fn",
    "state": "scoped_fn.state",
    "kernels": "scoped_fn.kernels",
    "interop": "scoped_fn.interop",
}


def room_files() -> list[str]:
    """Every Python file of the rooms, as a path from the root."""
    return sorted(path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def module_name(path: str) -> str:
    """The import name of a room's file: ``state/owners.py`` is ``scoped_fn.state.owners``."""
    room, *rest = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join([ROOMS[room], *rest])
