"""No state between calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

MUST_BE_LISTS = ("__all__", "__slots__", "__match_args__")
MUTABLE_CALLS = (
    "dict",
    "list",
    "set",
    "bytearray",
    "defaultdict",
    "OrderedDict",
    "Counter",
    "deque",
    "ChainMap",
    "count",
    "local",
    "ContextVar",
    "SimpleNamespace",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "WeakSet",
    "Queue",
    "Lock",
    "RLock",
)
MEMO_DECORATORS = ("cache", "lru_cache")


def module_state_rule(path: str, text: str) -> list[str]:
    """No module or class holds a value that can change, no function keeps a memo; the runtime is the exception."""
    if path == "scoped_fn/_runtime.py":
        return []
    tree = ast.parse(text)
    found = [(node.lineno, "mutable value at module level") for node in lasting_values(tree) if is_mutable(node)]
    found += changes_of_what_lasts(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append((node.lineno, "a global statement"))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            memos = [decorator for decorator in node.decorator_list if called_name(decorator) in MEMO_DECORATORS]
            found += [(memo.lineno, f"a memo: @{ast.unparse(memo)}") for memo in memos]
    return [f"{path}:{line}: {what}" for line, what in sorted(found)]


def changes_of_what_lasts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and complaint of each attribute set on a function or class of the module, and of each use of its globals."""
    lasting = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node) in ("globals()", "vars()"):
            yield node.lineno, "globals used as a dictionary"
        elif isinstance(node, ast.Call) and node.args and called_name(node) in ("setattr", "delattr", "__setattr__"):
            if ast.unparse(node.args[0]) in lasting:
                yield node.lineno, f"an attribute of {ast.unparse(node.args[0])} set"
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store | ast.Del)
            and ast.unparse(node.value) in lasting
        ):
            yield node.lineno, f"an attribute of {ast.unparse(node.value)} set"


def lasting_values(node: ast.AST) -> Iterator[ast.expr]:
    """The values bound by statements that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            if child.value and not all(isinstance(name, ast.Name) and name.id in MUST_BE_LISTS for name in targets):
                yield child.value
        elif isinstance(child, ast.stmt | ast.excepthandler) and not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef
        ):
            yield from lasting_values(child)


def is_mutable(node: ast.expr) -> bool:
    """Whether an expression makes something that can change; a call that is not known to is believed not to."""
    if isinstance(node, ast.Call):
        return called_name(node) in MUTABLE_CALLS
    if isinstance(node, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp | ast.GeneratorExp):
        return True
    if isinstance(node, ast.Lambda | ast.Subscript):
        return False
    return any(is_mutable(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))


def called_name(node: ast.expr) -> str:
    """The last part of the name of a call (or of a bare decorator), without the type parameters."""
    function = node.func if isinstance(node, ast.Call) else node
    function = function.value if isinstance(function, ast.Subscript) else function
    return ast.unparse(function).split(".")[-1]
