"""Casts of FP8 codes in an ATen graph: one for all the views of a tensor, next to what makes the codes.

Forward and backward read the same codes in two orders. One cast of the codes themselves fuses with the quantization.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from scoped_fn._torch.aten import VIEW_OPS

CAST = torch.ops.prims.convert_element_type.default
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def share_casts(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph with casts of views of FP8 codes as views of one cast. Edits it."""
    made: dict[tuple[torch.fx.Node, torch.dtype], torch.fx.Node] = {}
    for node in gm.graph.find_nodes(op="call_function", target=CAST):
        codes: Any = node.args[0]
        if codes.meta["val"].dtype not in FP8 or node in made.values():
            continue
        views, base = _views(codes)
        key = (base, node.args[1])
        if key not in made:
            made[key] = _cast(base, node.args[1])
        with gm.graph.inserting_before(node):
            node.replace_all_uses_with(_seen_through(made[key], views))
        gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _views(node: torch.fx.Node) -> tuple[list[torch.fx.Node], torch.fx.Node]:
    """Returns the views that lead to a node, first to last, and what they are of."""
    views: list[torch.fx.Node] = []
    while node.target in VIEW_OPS:
        views.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return views, node


def _cast(base: torch.fx.Node, dtype: Any) -> torch.fx.Node:
    last = base if base.op != "placeholder" else base.graph.find_nodes(op="placeholder")[-1]
    with base.graph.inserting_after(last):
        cast = base.graph.call_function(CAST, (base, dtype))
    cast.meta["val"] = CAST(base.meta["val"], dtype)
    return cast


def _seen_through(node: torch.fx.Node, views: Sequence[torch.fx.Node]) -> torch.fx.Node:
    for view in views:
        made = node.graph.call_function(view.target, (node, *view.args[1:]), dict(view.kwargs))  # type: ignore[arg-type]
        made.meta["val"] = view.target(node.meta["val"], *view.args[1:], **view.kwargs)  # type: ignore[operator]
        node = made
    return node
