"""Quantizations in an ATen graph: equal ones are made once, and no transposed copy that nobody reads."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx

from scoped_fn._torch.aten import VIEW_OPS

OPS = torch.ops.scoped_fn
# Where each has its flag for the transposed copy, and which results that concerns.
QUANTIZE: Final[Mapping[Any, tuple[int, tuple[int, ...]]]] = MappingProxyType(
    {
        OPS.quantize.default: (3, (1,)),
        OPS.quantize_current.default: (4, (1,)),
        OPS.quantize_blocks.default: (5, (2, 3)),
        OPS.quantize_mx.default: (2, (2, 3)),
        OPS.quantize_nvfp4.default: (3, (2, 3)),
    }
)
# What may lie between an argument and its quantization.
VIEWS = (*VIEW_OPS, operator.getitem)


def share_quantizations(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph with equal quantizations of one tensor made once. Edits it."""
    if not any(node.target in QUANTIZE for node in gm.graph.nodes):
        return gm
    seen: dict[Any, torch.fx.Node] = {}
    results = set(gm.graph.output_node().all_input_nodes)
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or (node.target not in QUANTIZE and node.target not in VIEWS) or node in results:
            continue
        key = (node.target, _hashable(node.args), _hashable(tuple(sorted(node.kwargs.items()))))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
    for node in [node for node in gm.graph.nodes if node.target in QUANTIZE]:
        _drop_transposed(node)
    gm.recompile()
    return gm


def _hashable(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_hashable, value))
    return (type(value), value)


def _drop_transposed(node: torch.fx.Node) -> None:
    at, places = QUANTIZE[node.target]
    taken = [user for user in node.users if user.args[1] in places]
    if not node.args[at] or any(user.users for user in taken):
        return
    for user in taken:
        node.graph.erase_node(user)
    node.args = (*node.args[:at], False, *node.args[at + 1 :])
    values = list(node.meta["val"])
    for i in places:
        values[i] = values[i].new_empty((len(values[i]), 0, 0))
    node.meta["val"] = tuple(values)
