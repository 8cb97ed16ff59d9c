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
    """Local name -> dotted name, for names bound by imports and by assignments of imported things."""
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
        for target, value in assigned_names(node):
            if name := dotted(value, names):
                names[target] = name
    return names


def assigned_names(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Name and value of each plain name that a node binds by ``=``, ``:=`` or ``with ... as``."""
    pairs: list[tuple[ast.expr | None, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.withitem):
        pairs = [(node.optional_vars, node.context_expr)]
    for target, value in pairs:
        if isinstance(target, ast.Name) and value is not None:
            yield target.id, value
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            yield from (
                (one.id, of) for one, of in zip(target.elts, value.elts, strict=True) if isinstance(one, ast.Name)
            )


def dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """The dotted name of an attribute chain that begins at an imported name, however the chain is written."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return joined(dotted(node.value, names), node.attr)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("sys.modules", "modules"):
        return constant_text(node.slice)
    if isinstance(node, ast.Call) and node.args:
        function = ast.unparse(node.func).split(".")[-1]
        if function in ("import_module", "__import__"):
            return constant_text(node.args[0])
        if function == "vars":
            return joined(dotted(node.args[0], names), "__dict__")
        if function == "getattr" and len(node.args) > 1:
            return joined(dotted(node.args[0], names), constant_text(node.args[1]))
    return None


def joined(owner: str | None, attribute: str | None) -> str | None:
    """The dotted name of an attribute, if both parts are known."""
    return f"{owner}.{attribute}" if owner and attribute else None


def constant_text(node: ast.AST) -> str | None:
    """The text of a string that is written out."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def has_private_part(name: str) -> bool:
    """Whether some part of a dotted name begins with one underscore (``__version__`` and its like are public)."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
