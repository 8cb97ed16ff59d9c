"""Sites: the matmuls of a captured graph that autocast may turn into FP8, and what they are called."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.nn import functional

from scoped_fn._errors import SpecError
from scoped_fn._graph import fake_value, user_line

aten = torch.ops.aten
LINEAR = (functional.linear, aten.linear.default)
MATMUL = (
    torch.matmul, torch.mm, torch.bmm, operator.matmul, "matmul", "mm", "bmm", "__matmul__",
    aten.matmul.default, aten.mm.default, aten.bmm.default,
)  # fmt: skip
ADDMM = (torch.addmm, "addmm", aten.addmm.default)
# What a weight may pass through on its way to a matmul.
VIEWS = frozenset(
    ("t", "T", "mT", "transpose", "swapaxes", "permute", "view", "reshape", "to", "type_as", "float", "bfloat16",
     "half", "contiguous", "unsqueeze", "squeeze", "expand", "flatten", "clone", "_to_copy", "getattr", "numpy_T")
)  # fmt: skip
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Matmul:
    """One matmul of a graph.

    Attributes:
        node: The node.
        kind: "linear", or "matmul".
        x: Its activation.
        w: Its weight, or second activation.
        bias: What is added, or None.
        swapped: Whether the weight is the first operand.
        weight: The placeholder that the weight comes from; None for two activations.
    """

    node: torch.fx.Node
    kind: str
    x: torch.fx.Node
    w: torch.fx.Node
    bias: torch.fx.Node | None
    swapped: bool
    weight: torch.fx.Node | None


def matmuls(graph: torch.fx.Graph, weights: frozenset[torch.fx.Node], *, every: bool) -> Iterator[Matmul]:
    """Yields the matmuls of a graph.

    Args:
        graph: A torch-level graph.
        weights: The placeholders that count as weights.
        every: Whether products of two activations are wanted too.
    """
    for node in graph.nodes:
        found = _matmul(node, weights) if node.op in ("call_function", "call_method") else None
        if found is not None and (found.kind == "linear" or found.weight is not None or every):
            yield found


def _matmul(node: torch.fx.Node, weights: frozenset[torch.fx.Node]) -> Matmul | None:
    values: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}

    def operand(at: int, *names: str) -> Any:
        return next((values[key] for key in (at, *names) if key in values), None)

    if "out" in node.kwargs:
        return None
    if node.target in LINEAR:
        x, w, bias = operand(0, "input"), operand(1, "weight"), operand(2, "bias")
        return Matmul(node, "linear", x, w, bias, False, origin(w, weights))
    if node.target in MATMUL:
        return _product(node, operand(0, "input", "self"), operand(1, "other", "mat2"), None, weights)
    if node.target in ADDMM and operand(3, "beta") in (None, 1) and operand(4, "alpha") in (None, 1):
        bias, x, w = operand(0, "input", "self"), operand(1, "mat1"), operand(2, "mat2")
        return _product(node, x, w, bias, weights)
    return None


def _product(node: torch.fx.Node, x: Any, w: Any, bias: Any, weights: frozenset[torch.fx.Node]) -> Matmul | None:
    if not (isinstance(x, torch.fx.Node) and isinstance(w, torch.fx.Node)):
        return None
    right, left = origin(w, weights), origin(x, weights)
    if right is None and left is not None:
        return Matmul(node, "matmul", w, x, bias, True, left)
    return Matmul(node, "matmul", x, w, bias, False, right)


def origin(node: Any, weights: frozenset[torch.fx.Node]) -> torch.fx.Node | None:
    """Returns the weight that a node is a view or cast of, or None."""
    while isinstance(node, torch.fx.Node) and node not in weights:
        if not is_view(node):
            return None
        node = node.args[0]
    return node if isinstance(node, torch.fx.Node) else None


def is_view(node: torch.fx.Node) -> bool:
    """Returns whether a node is a view, copy or cast of another."""
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    return node.op in ("call_function", "call_method") and name in VIEWS and bool(node.args)


class Names:
    """Gives each matmul the name of its site; a layer that is called twice is one site."""

    def __init__(self, names_of: Mapping[torch.fx.Node, tuple[str, ...]], layers: Sequence[str]) -> None:
        """Takes the names of each weight's placeholder, and those of all linear layers."""
        self.names_of = names_of
        weights = [name.removesuffix(".weight") for names in names_of.values() for name in names]
        self.given: dict[str, Any] = dict.fromkeys([*weights, *layers])  # no other matmul may be called so

    def of(self, found: Matmul, weight: torch.fx.Node | None) -> str:
        """Returns the name of a matmul whose weight is that placeholder of the outermost graph."""
        path, kind = module_path(found.node)
        if path and found.kind == "linear" and isinstance(kind, type) and issubclass(kind, torch.nn.Linear):
            return path
        if weight is None:
            return self._unique(f"{path}.{found.kind}".lstrip("."), found.w)
        names = self.names_of[weight]
        own = next((name for name in names if path and name.rpartition(".")[0] == path), names[0])
        return own.removesuffix(".weight")

    def _unique(self, base: str, w: Any) -> str:
        name, count = base, 0
        while self.given.setdefault(name, w) is not w:
            count += 1
            name = f"{base}_{count}"
        return name


def module_path(node: torch.fx.Node) -> tuple[str, Any]:
    """Returns where the module that a node belongs to is, such as `layers.0.attn`, and its class; "" if unknown."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", None)
    prefix, _, rest = path.partition(".call")
    return (dotted(rest).strip("."), kind) if prefix == "L['source']" else ("", None)


def dotted(name: str) -> str:
    """Returns a path with subscripts as dots: `params['0.weight']` is `params.0.weight`."""
    return re.sub(r"\['?(.*?)'?\]", r".\1", name.replace("._modules", ""))


def check_dtype(found: Matmul, name: str) -> bool:
    """Returns whether a matmul can run in FP8; False for one of whole or complex numbers.

    Raises:
        SpecError: It is in float64, which FP8 would silently replace.
    """
    dtype = getattr(fake_value(found.w), "dtype", torch.float32)
    if dtype == torch.float64:
        raise SpecError(
            f"Expected {name!r} in float32, bfloat16 or float16 under FP8 autocast, got "
            f"float64{user_line(found.node)}. Convert the model, or keep the layer in high precision: skip=({name!r},)."
        )
    return dtype in FLOATS


def skipped(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a pattern means the name: the whole, its last parts, or a glob."""
    return any(name == p or name.endswith(f".{p}") or fnmatch.fnmatchcase(name, p) for p in patterns)


def check_skip(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raises `SpecError` if a pattern means none of the names."""
    for pattern in patterns:
        if not any(skipped(name, (pattern,)) for name in names):
            layers = ", ".join(dict.fromkeys(names)) or "none"
            raise SpecError(f"Expected skip patterns that match a layer, got {pattern!r}. The layers are: {layers}.")
