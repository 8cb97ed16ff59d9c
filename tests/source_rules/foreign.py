"""Other libraries stay as they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.source_rules.names import bound_names, dotted

FOREIGN = ("torch", "triton", "jax")
# What changes its first argument, under whichever name it is reached: `object.__setattr__`, `builtins.setattr`.
SETTERS = ("setattr", "delattr", "__setattr__", "__delattr__", "setitem", "delitem")
# Methods that change the object they are called on; `add` and `remove` are left out, torch.add is no method.
CHANGING_METHODS = (
    "__setattr__",
    "__delattr__",
    "__setitem__",
    "__delitem__",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "clear",
    "append",
    "extend",
    "insert",
)
# Functions that throw away, or replace, what the whole process has.
RESETS = (
    "torch.compiler.reset",
    "torch._dynamo.reset",
    "torch._dynamo.reset_code_caches",
    "torch._inductor.config.load_config",
    "torch._functorch.config.load_config",
    "torch._dynamo.config.load_config",
)


def foreign_assignment_rule(path: str, text: str) -> list[str]:
    """Nothing is assigned to, or deleted from, an attribute of another library, and nothing of it is reset."""
    tree = ast.parse(text)
    names = bound_names(tree)
    found = [
        (target.lineno, name)
        for node in ast.walk(tree)
        for target in changed_objects(node, names)
        if (name := dotted(target, names)) and name.split(".")[0] in FOREIGN
    ]
    return [f"{path}:{line}: changes {name}" for line, name in sorted(found)]


def changed_objects(node: ast.AST, names: dict[str, str]) -> Iterator[ast.expr]:
    """The objects that a node sets or deletes an attribute or an item of."""
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.value
    elif isinstance(node, ast.Call):
        function = ast.unparse(node.func).split(".")[-1]
        if node.args and function in SETTERS:
            yield node.args[0]
        if isinstance(node.func, ast.Attribute) and function in CHANGING_METHODS:
            yield node.func.value
        if dotted(node.func, names) in RESETS:
            yield node.func
