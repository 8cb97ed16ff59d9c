"""Private torch has two doors, a folder and a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.source_rules.names import bound_names, constant_text, dotted, has_private_part, imported_names, joined

PRIVATE_TORCH_DOORS = ("scoped_fn/_torch/", "kernels/_opaque_op.py")
# In use by everyone who writes pytrees for torch; public in all but its name.
PUBLIC_IN_FACT = "torch.utils._pytree"


def private_torch_rule(path: str, text: str) -> list[str]:
    """Private names of torch are named in the doors only."""
    if path.startswith(PRIVATE_TORCH_DOORS):
        return []
    found = {(line, name) for line, name in dotted_names(ast.parse(text)) if is_private_torch(name)}
    # `torch._C` inside `torch._C.x` is one complaint.
    inner = {(line, name) for line, name in found for other in found if other[0] == line and name + "." in other[1]}
    return [f"{path}:{line}: private {name}" for line, name in sorted(found - inner)]


def is_private_torch(name: str) -> bool:
    """Whether a dotted name is of torch and has a private part."""
    return name.split(".")[0] == "torch" and has_private_part(name.replace(PUBLIC_IN_FACT, "torch.utils", 1))


def dotted_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, attribute, ``getattr`` and string that is one dotted name."""
    yield from ((line, name) for line, name, _ in imported_names(tree))
    names = bound_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node, names)):
            yield node.lineno, name
        elif isinstance(node, ast.Constant) and (text := constant_text(node)) and re.fullmatch(r"\w+(\.\w+)+", text):
            yield node.lineno, text
        elif isinstance(node, ast.Call) and len(node.args) > 1 and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = joined(dotted(node.args[0], names), constant_text(node.args[1]))
            yield from [(node.lineno, name)] if name else []
