"""`Graph`: an FX graph with names a reader knows, and its text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from scoped_fn._errors import RandomOpError
from scoped_fn._torch.aten import is_higher_order, operator_arguments
from scoped_fn._torch.tensors import storage_id

RANDOM_HIGHER_ORDER = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")
TORCH_FOLDER, OWN_FOLDER = str(Path(torch.__file__).parent), str(Path(__file__).parent)


@dataclass(frozen=True, eq=False)
class Graph:
    """A flat graph, tensors in and tensors out; `print(graph)` is readable code.

    Attributes:
        gm: The `torch.fx.GraphModule`. Do not edit it: copy it with `copy_graph`, or write a pass.
        inputs: What each placeholder is, in order: a parameter's or buffer's name, an argument, a tangent.
        outputs: What each output is, in order.
    """

    gm: torch.fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return graph_text(self)

    def __repr__(self) -> str:
        return f"Graph({len(self.gm.graph.nodes)} nodes, inputs={self.inputs}, outputs={self.outputs})"


def copy_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns a copy that can be edited: new nodes and metadata, the same parameters and submodules.

    Example:
        >>> gm = torch.fx.symbolic_trace(torch.nn.Identity())
        >>> copy_graph(gm).graph is gm.graph
        False
    """
    graph = torch.fx.Graph()
    result = graph.graph_copy(gm.graph, {})
    old = gm.graph.output_node()
    new = graph.output(result, type_expr=old.type)
    new.meta = dict(old.meta)
    made = torch.fx.GraphModule(gm, graph, class_name=type(gm).__name__)
    made.meta = dict(gm.meta)
    return made


def fake_value(node: torch.fx.Node) -> Any:
    """Returns the fake tensor that a node was traced with; Dynamo and ATen tracing keep it under two names."""
    return node.meta.get("val", node.meta.get("example_value"))


def fake_inputs(gm: torch.fx.GraphModule) -> list[Any]:
    """Returns the fake tensors that the graph's placeholders were traced with."""
    return [fake_value(node) for node in gm.graph.find_nodes(op="placeholder")]


def output_values(gm: torch.fx.GraphModule) -> list[Any]:
    """Returns what the graph returns: nodes or None, in order."""
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def draws(node: torch.fx.Node) -> bool:
    """Returns whether a node draws random numbers, or draws again what a checkpoint region drew; itself or inside."""
    if any(draws(inner) for part in _subgraphs(node) for inner in part.graph.nodes):
        return True
    if getattr(node.target, "__name__", "") in RANDOM_HIGHER_ORDER:
        return True
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    arguments = operator_arguments(node)  # attention draws only if it drops, other operations only in training
    return bool(arguments.get("dropout_p", 1.0) != 0.0) and arguments.get("training", True) is not False


def refuse_random_ops(gm: torch.fx.GraphModule, name: str) -> None:
    """Raises `RandomOpError` if a graph draws random numbers by itself, not from a key."""
    for node in gm.graph.nodes:
        if draws(node):
            raise RandomOpError(
                f"Expected random operations of {name} that can draw from the state's key, got {node.target}"
                f"{user_line(node)}. Use one of docs/random.md, pass the numbers as an argument, or compile with "
                "rng='torch' to draw from torch's generators, as eager does."
            )


def draws_anywhere(gm: torch.fx.GraphModule) -> bool:
    """Returns whether a graph draws random numbers."""
    return any(map(draws, gm.graph.nodes))


def acts(node: torch.fx.Node) -> bool:
    """Returns whether running an operation does more than give its result: it draws, writes or has an effect."""
    if node.op != "call_function":
        return False
    inside = (inner for part in _subgraphs(node) for inner in part.graph.nodes)
    return draws(node) or bool(node.is_impure(impure_random=False)) or any(map(acts, inside))


def _subgraphs(node: torch.fx.Node) -> list[torch.fx.GraphModule]:
    """Returns the graphs that an operation such as `torch.cond` takes."""
    if not is_higher_order(node.target):
        return []
    root: Any = node.graph.owning_module
    parts = [getattr(root, str(used.target), None) for used in node.all_input_nodes if used.op == "get_attr"]
    return [part for part in parts if isinstance(part, torch.fx.GraphModule)]


def storage_bytes(tree: Any) -> dict[int, int]:
    """Returns the storages of the tensors of a tree, fake or real, and their bytes."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return {storage_id(tensor): _plain(tensor.untyped_storage().nbytes()) for tensor in leaves}


def _plain(count: Any) -> int:
    """Returns a number of bytes; the only tensors of unknown length are saved states of the random generator."""
    return count if type(count) is int else torch.get_rng_state().nbytes


def user_line(node: torch.fx.Node) -> str:
    """Returns ' (file:line)' of the user's code behind a node, or '' if it is not known."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File " in line]
    lines = [line for line in lines if not any(folder in line for folder in (TORCH_FOLDER, OWN_FOLDER))]
    if not lines:
        return ""
    file, line, *_ = lines[-1].removeprefix("File ").split(", ")
    return f" ({file.strip(chr(34))}:{line.removeprefix('line ')})"


def graph_text(graph: Graph) -> str:
    """Returns the graph as readable text: one line an input, one line an operation, then what is returned."""
    placeholders = graph.gm.graph.find_nodes(op="placeholder")
    names = dict(zip(placeholders, graph.inputs, strict=True))
    lines = ["graph("]
    lines += [f"    {name}: {value_text(node)}," for node, name in names.items()]
    lines.append("):")
    for node in graph.gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            lines.append(f"    {node.name}: {value_text(node)} = {_call_text(node, names)}")
    lines.append("    return (")
    results = zip(graph.outputs, output_values(graph.gm), strict=True)
    lines += [f"        {name} = {_argument_text(value, names)}," for name, value in results]
    return "\n".join([*lines, "    )"])


def value_text(node: torch.fx.Node) -> str:
    """Returns the type of a node's value, such as `float32[4, 3]`."""
    return _value_text(fake_value(node))


def _value_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_value_text, value)) + ")"
    return "?" if value is None else type(value).__name__


def _call_text(node: torch.fx.Node, names: dict[torch.fx.Node, str]) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    args = [_argument_text(arg, names) for arg in node.args]
    args += [f"{key}={_argument_text(arg, names)}" for key, arg in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    return f"{target_text(node.target)}({', '.join(args)})"


def target_text(target: Any) -> str:
    """Returns the name of an operation, such as `aten.mm`."""
    if hasattr(target, "overloadpacket"):
        return str(target).removesuffix(".default")
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", str(target))
    return name if module in ("", "_operator", "builtins") else f"{module}.{name}"


def _argument_text(value: Any, names: dict[torch.fx.Node, str]) -> str:
    if isinstance(value, torch.fx.Node):
        return names.get(value, value.name)
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_argument_text(item, names) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return repr(value)
