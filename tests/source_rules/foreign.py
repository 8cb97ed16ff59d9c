"""Other libraries stay as they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.source_rules.names import bound_names, dotted

FOREIGN = ("torch", "triton", "jax")
SETTERS = ("setattr", "delattr", "object.__setattr__", "type.__setattr__")


def foreign_assignment_rule(path: str, text: str) -> list[str]:
    """Nothing is assigned to, or deleted from, an attribute of another library."""
    tree = ast.parse(text)
    names = bound_names(tree)
    found = [
        (node.lineno, name)
        for node in ast.walk(tree)
        for target in changed_objects(node)
        if (name := dotted(target, names)) and name.split(".")[0] in FOREIGN
    ]
    return [f"{path}:{line}: changes {name}" for line, name in sorted(found)]


def changed_objects(node: ast.AST) -> Iterator[ast.AST]:
    """The objects that a node sets or deletes an attribute or an item of."""
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.value
    elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in SETTERS:
        yield node.args[0]
