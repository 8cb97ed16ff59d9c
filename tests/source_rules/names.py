"""Dotted names in source text."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def imported_names(node: ast.AST, lazy: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Line, dotted name, and whether it waits for a call (or for a type checker), of each import under a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            yield from ((child.lineno, f"{module}.{alias.name}", lazy) for alias in child.names)
        else:
            waits = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(child)
            yield from imported_names(child, lazy or waits)


def is_type_checking(node: ast.AST) -> bool:
    """Whether a statement is ``if TYPE_CHECKING:``."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def bound_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted name, for names bound by imports and by plain assignments of imported things."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import a.b` binds a, `import a.b as c` binds a.b.
                bound = alias.name if alias.asname else alias.name.split(".")[0]
                names[alias.asname or bound] = bound
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (name := dotted(node.value, names)):
            names |= {target.id: name for target in node.targets if isinstance(target, ast.Name)}
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """The dotted name of an attribute chain that begins at an imported name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join([names[node.id], *parts]) if isinstance(node, ast.Name) and node.id in names else None


def has_private_part(name: str) -> bool:
    """Whether some part of a dotted name begins with one underscore (``__version__`` and its like are public)."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
