"""A captured graph whose random operations draw from the state's key."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
import torch.fx

from scoped_fn._graph import copy_graph, user_line
from scoped_fn._random.rules import Keyed, OwnDraws, keyed
from scoped_fn._random.words import keys_of
from scoped_fn._torch.aten import is_higher_order

KEY: Final = ".random.key"  # no buffer can have such a name: a module has no part without a name
CHECKPOINT: Final = torch.ops.higher_order.tag_activation_checkpoint
CHOICE: Final = torch.ops.higher_order.cond


def with_keys(gm: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, bool]:
    """Returns the graph with one more placeholder, the words of a key, and whether it draws from it.

    If it does, it has one more output, the words of the next key. With n draws, in the order of the graph, they use the
    keys 1 to n of `split(key, n + 1)`, and key 0 is the next.
    """
    gm = copy_graph(gm)
    graph = gm.graph
    key = _placeholder(graph, torch.empty(2, dtype=torch.int32, device="meta"))
    total, own = sum(1 for _ in _draws(gm)), [node for node in graph.nodes if isinstance(node.target, OwnDraws)]
    if total == 0 and not own:
        gm.recompile()
        return gm, False
    with graph.inserting_after(key):
        keys = graph.call_function(keys_of, (key, total + 1))
    keys.meta["val"] = torch.empty(total + 1, 2, dtype=torch.int32, device="meta")
    _rewrite(gm, keys, iter(range(1, total + 1)))
    for node in own:  # a graph with such a node has no other that draws
        node.target, node.args = replace(node.target, from_key=True), (*node.args, key)
    output = graph.output_node()
    with graph.inserting_before(output):
        following = graph.call_function(torch.clone, (_row(graph, keys, 0),))
    following.meta["val"] = torch.empty(2, dtype=torch.int32, device="meta")
    output.args = ((*output.args[0], following),)  # type: ignore[misc]
    gm.recompile()
    return gm, True


def draws_in_regions(gm: torch.fx.GraphModule) -> bool:
    """Returns whether a checkpoint region of a graph draws from keys."""
    parts = [part for node in gm.graph.nodes if node.target is CHECKPOINT for part in _parts(gm, node)]
    return any(isinstance(node.target, Keyed) for part in parts for node in part.graph.nodes) or any(
        map(draws_in_regions, parts)
    )


def _placeholder(graph: torch.fx.Graph, value: torch.Tensor) -> torch.fx.Node:
    """Adds a placeholder behind the others, with a name that none of them has."""
    known = graph.find_nodes(op="placeholder")
    name = "random_key"
    while name in [node.target for node in known]:
        name += "_"
    with graph.inserting_after(known[-1]) if known else graph.inserting_before(next(iter(graph.nodes))):
        made = graph.placeholder(name)
    made.meta["val"] = value
    return made


def _draws(gm: torch.fx.GraphModule) -> Iterator[Keyed]:
    """Yields what takes the place of each random operation, in order; those of regions and branches too."""
    for node in gm.graph.nodes:
        for part in _parts(gm, node):
            yield from _draws(part)
        found = _keyed(node)
        if found is not None:
            yield found


def _keyed(node: torch.fx.Node) -> Keyed | None:
    if node.op not in ("call_function", "call_method"):
        return None
    return keyed(node.target, node.args, node.kwargs, user_line(node))


def _parts(gm: torch.fx.GraphModule, node: torch.fx.Node) -> list[torch.fx.GraphModule]:
    """Returns the graphs of a checkpoint region or of a choice."""
    if not is_higher_order(node.target) or node.target not in (CHECKPOINT, CHOICE):
        return []
    return [getattr(gm, str(arg.target)) for arg in node.args if _is_part(gm, arg)]  # type: ignore[union-attr]


def _is_part(gm: torch.fx.GraphModule, arg: Any) -> bool:
    if not isinstance(arg, torch.fx.Node) or arg.op != "get_attr":
        return False
    return isinstance(getattr(gm, str(arg.target), None), torch.fx.GraphModule)


def _rewrite(gm: torch.fx.GraphModule, keys: torch.fx.Node, numbers: Iterator[int]) -> None:
    """Makes each random operation draw from its row of the keys. Edits the graph, but none of its parts."""
    for node in list(gm.graph.nodes):
        if any(True for part in _parts(gm, node) for _ in _draws(part)):
            _rewrite_parts(gm, node, keys, numbers)
        found = _keyed(node)
        if found is not None:
            with gm.graph.inserting_before(node):
                row = _row(gm.graph, keys, next(numbers))
                made = gm.graph.call_function(found, (row, *node.args), dict(node.kwargs))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)


def _row(graph: torch.fx.Graph, keys: torch.fx.Node, number: int) -> torch.fx.Node:
    row = graph.call_function(operator.getitem, (keys, number))
    row.meta["val"] = torch.empty(2, dtype=torch.int32, device="meta")
    return row


def _rewrite_parts(gm: torch.fx.GraphModule, node: torch.fx.Node, keys: torch.fx.Node, numbers: Iterator[int]) -> None:
    """Gives a region or choice the keys as one more operand."""
    args = list(node.args)
    for i, arg in enumerate(args):
        if _is_part(gm, arg):
            name = str(arg.target)  # type: ignore[union-attr]
            part = copy_graph(getattr(gm, name))
            inner = _placeholder(part.graph, keys.meta["val"])
            _rewrite(part, inner, numbers)
            part.recompile()
            setattr(gm, f"{name}_from_keys", part)
            with gm.graph.inserting_before(node):
                args[i] = gm.graph.get_attr(f"{name}_from_keys")
            args[i].meta = dict(arg.meta)  # type: ignore[union-attr]
    if node.target is CHOICE:
        args[-1] = (*args[-1], keys)  # type: ignore[misc]
    else:
        args.append(keys)
    node.args = tuple(args)
