"""The rewrite of a captured graph: each site becomes one call in FP8, with scales in and amaxes out."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from scoped_fn._fp8.plan import ROLES, SITE, Column, Fp8Plan, delayed_roles
from scoped_fn._fp8.sites import Matmul, Names, matmuls
from scoped_fn._graph import copy_graph, fake_value, output_values
from scoped_fn._replay import CHECKPOINT
from scoped_fn.kernels import MatmulRule, fp8_linear, fp8_matmul

Node = torch.fx.Node
Key = tuple[str, Any]  # ("scale", column), ("sink", column), ("code", (site, index))


class Region:
    """A graph that is rewritten: the model's own, or the body of a checkpoint region inside another.

    Attributes:
        gm: The graph, a copy.
        found: Its matmuls with the names of their sites.
        inner: Checkpoint regions inside, by the node that calls them.
        outer: The region that holds it, and the node that calls it.
        values: What enters: scales, sinks and codes by key; a sink is replaced by the one that comes out.
        amaxes: What goes out: site -> amaxes of input and weight (2,).
        replaced: Matmuls that are gone, and what stands in their places.
    """

    def __init__(self, gm: torch.fx.GraphModule, outer: tuple[Region, Node] | None = None) -> None:
        self.gm, self.outer = gm, outer
        self.found: list[tuple[Matmul, str]] = []
        self.inner: dict[Node, Region] = {}
        self.values: dict[Key, Node] = {}
        self.amaxes: dict[str, Node] = {}
        self.replaced: dict[Node, Node] = {}

    def find(self, weight_of: Mapping[Node, Node], names: Names, *, every: bool) -> None:
        """Finds matmuls, here and in checkpoint regions.

        Args:
            weight_of: Placeholder of this graph -> the weight that it stands for in the outermost one.
            names: Gives names.
            every: Whether products of two activations count.
        """
        for found in matmuls(self.gm.graph, frozenset(weight_of), every=every):
            weight = None if found.weight is None else weight_of[found.weight]
            self.found.append((found, names.of(found, weight)))
        for node in self.gm.graph.find_nodes(op="call_function", target=CHECKPOINT):
            body = copy_graph(getattr(self.gm, body_of(node).target))
            region = self.inner[node] = Region(body, (self, node))
            given = zip(body.graph.find_nodes(op="placeholder"), node.args[1:], strict=False)
            inside = {mine: weight_of[theirs] for mine, theirs in given if theirs in weight_of}
            region.find(inside, names, every=every)

    def everything(self) -> list[tuple[Matmul, str]]:
        """Returns the matmuls here and inside, in the order of the graph."""
        own = {found.node: [(found, name)] for found, name in self.found}
        inside = {node: region.everything() for node, region in self.inner.items()}
        return [pair for node in self.gm.graph.nodes for pair in own.get(node, inside.get(node, ()))]

    def rewrite(self, plan: Fp8Plan) -> None:
        """Replaces the matmuls of the plan's sites, in the order of the graph."""
        steps = {found.node: (found, name) for found, name in self.found if name in plan.rules}
        for node in list(self.gm.graph.nodes):
            if node in steps:
                found, name = steps[node]
                self._replace(found, name, plan.rules[name])
            elif node in self.inner and self.inner[node].everything():
                self._enter(node, self.inner[node], plan)
        self.gm.recompile()

    def _replace(self, found: Matmul, name: str, rule: MatmulRule) -> None:
        node, graph, roles = found.node, self.gm.graph, delayed_roles(rule)
        sink_key: Key = ("sink", (name, ROLES[2]))
        with graph.inserting_before(node):
            scales = tuple(self.value(("scale", (name, role))) if role in roles else None for role in ROLES)
            sink = self.value(sink_key) if ROLES[2] in roles else None
            made = graph.call_function(*self._call(found, str(rule), scales, sink, self._codes(name)))
            y = result = graph.call_function(operator.getitem, (made, 0))
            amax = graph.call_function(operator.getitem, (made, 1)) if set(roles) & set(ROLES[:2]) else None
            after = graph.call_function(operator.getitem, (made, 2)) if sink is not None else None
            if found.bias is not None and found.kind == "matmul":
                result = graph.call_function(add_bias, (y, self._now(found.bias)))
                result.meta = dict(node.meta)
            self._describe(node, name, made, y, amax, after)
            if amax is not None:
                self.amaxes[name] = self._maximum(name, amax)
        if after is not None:
            self.values[sink_key] = after
        self.replaced[node] = result
        node.replace_all_uses_with(result)
        graph.erase_node(node)

    def _now(self, node: Any) -> Any:
        """Returns what stands in the place of a node that may have been replaced."""
        return self.replaced.get(node, node)

    def _call(self, found: Matmul, rule: str, scales: Any, sink: Any, codes: Any) -> tuple[Any, tuple[Any, ...]]:
        x, w, bias = (self._now(operand) for operand in (found.x, found.w, found.bias))
        if found.kind == "linear":
            return fp8_linear, (x, w, bias, rule, scales, sink, *(() if codes is None else (codes,)))
        return fp8_matmul, (x, w, rule, scales, sink, codes or (None,) * 4, found.swapped)

    def _describe(self, node: Node, name: str, made: Node, y: Node, amax: Node | None, after: Node | None) -> None:
        fake = fake_value(node)
        numbers = fake.new_empty(2, dtype=torch.float32), fake.new_empty((), dtype=torch.float32)
        y.meta = dict(node.meta)
        for result, value in zip((amax, after), numbers, strict=True):
            if result is not None:
                result.meta = {"val": value}
        made.meta = {**node.meta, "val": (fake, *numbers), SITE: name}
        made.meta.pop("example_value", None)

    def _codes(self, name: str) -> tuple[Node | None, ...] | None:
        keys: list[Key] = [("code", (name, i)) for i in range(4)]
        root: Region = self
        while root.outer is not None:
            root = root.outer[0]
        if keys[0] not in root.values:
            return None
        return tuple(self.value(key) if key in root.values else None for key in keys)

    def _maximum(self, name: str, amax: Node) -> Node:
        before = self.amaxes.get(name)
        if before is None:
            return amax
        made = self.gm.graph.call_function(torch.maximum, (before, amax))
        made.meta = dict(amax.meta)
        return made

    def value(self, key: Key) -> Node:
        """Returns the node of a scale, sink or code in this region; brings it in from outside if it must."""
        if key not in self.values:
            assert self.outer is not None, f"Expected {key} among the inputs of the graph."
            region, call = self.outer
            with region.gm.graph.inserting_before(call):
                theirs = region.value(key)
            last = self.gm.graph.find_nodes(op="placeholder")[-1]
            with self.gm.graph.inserting_after(last):
                mine = self.gm.graph.placeholder(f"fp8_{len(call.args)}")
            mine.meta = dict(theirs.meta)
            call.args = (*call.args, theirs)
            self.values[key] = mine
        return self.values[key]

    def _enter(self, call: Node, region: Region, plan: Fp8Plan) -> None:
        """Rewrites a checkpoint region; its amaxes and sinks come out as further results."""
        region.rewrite(plan)
        output = region.gm.graph.output_node()
        results = list(output_values(region.gm))
        sinks = [key for key, node in region.values.items() if key[0] == "sink" and node.op != "placeholder"]
        more = [*region.amaxes.values(), *(region.values[key] for key in sinks)]
        output.args = ((*results, *more),)
        region.gm.recompile()
        name = f"{body_of(call).target}_fp8"
        setattr(self.gm, name, region.gm)
        with self.gm.graph.inserting_before(call):
            body = self.gm.graph.get_attr(name)
        body.meta = dict(body_of(call).meta)
        call.args = (body, *call.args[1:])
        self._take_out(call, region, sinks, len(results))

    def _take_out(self, call: Node, region: Region, sinks: Sequence[Key], first: int) -> None:
        """Takes the amaxes of a checkpoint region, then its sinks, out of its results."""
        fakes = list(call.meta.get("val", call.meta.get("example_value")) or ())
        inner = [*region.amaxes.values(), *(region.values[key] for key in sinks)]
        with self.gm.graph.inserting_before(call.next):
            taken = [self.gm.graph.call_function(operator.getitem, (call, first + i)) for i in range(len(inner))]
            for node, of in zip(taken, inner, strict=True):
                node.meta = dict(of.meta)
            for site, node in zip(region.amaxes, taken, strict=False):
                self.amaxes[site] = self._maximum(site, node)
        self.values |= dict(zip(sinks, taken[len(region.amaxes) :], strict=True))
        call.meta = {**call.meta, "val": (*fakes, *(fake_value(node) for node in inner))}
        call.meta.pop("example_value", None)


def body_of(call: Node) -> Any:
    """Returns the node that names the body of a checkpoint region."""
    return call.args[0]


def add_bias(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Returns y + bias in the dtype of y, as autocast has it."""
    return y + bias.to(y.dtype)


def collect_amaxes(layout: Sequence[tuple[int, int] | None], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the amaxes of all columns (n,), zeros where a column has none.

    Args:
        layout: For each column, which part and which of its two numbers; None for zero.
        parts: The amaxes of each site, (2,).
    """
    nothing, pieces, at = parts[0].new_zeros(1), [], 0
    while at < len(layout):
        place = layout[at]
        if place is None:
            pieces.append(nothing)
        elif place[1] == 0 and layout[at + 1 : at + 2] == [(place[0], 1)]:
            pieces.append(parts[place[0]])
            at += 1
        else:
            pieces.append(parts[place[0]][place[1] : place[1] + 1])
        at += 1
    return torch.cat(pieces)


def layout_of(columns: Sequence[Column], sites: Sequence[str]) -> list[tuple[int, int] | None]:
    """Returns where the amax of each column is among those of the sites."""
    places = {(site, role): (i, j) for i, site in enumerate(sites) for j, role in enumerate(ROLES[:2])}
    return [places.get(column) for column in columns]
