"""Runs a graph node by node, and takes down time and memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from scoped_fn._graph import fake_inputs, storage_bytes, target_text
from scoped_fn._profile import NodeProfile


class Watched(torch.fx.Interpreter):
    """A run of a graph that lets go of each value after its last use, as compiled code does.

    Attributes:
        nodes: What was taken down of the nodes that have run.
    """

    def __init__(
        self, gm: torch.fx.GraphModule, name: str, held: Sequence[Any], base: int, nodes: list[NodeProfile]
    ) -> None:
        """Takes a graph, its name, the tensors that the caller holds, the bytes in use besides, and where to note."""
        super().__init__(gm)
        self.nodes = nodes
        self._name, self._theirs, self._live = name, storage_bytes(held).keys(), base
        self._users: dict[int, int] = {}  # storage -> how many values that are alive share it
        self._sizes: dict[int, int] = {}
        self._own: dict[torch.fx.Node, list[int]] = {}
        self._last = _last_uses(gm)

    def run_node(self, n: torch.fx.Node) -> Any:
        """Runs a node."""
        started = time.perf_counter()
        result = super().run_node(n)
        if n.op in ("placeholder", "output", "get_attr"):
            return result
        _wait_for(result)
        seconds = time.perf_counter() - started
        new = self._hold(n, result)
        peak = self._live
        for used in self._last.get(n, ()):
            self._let_go(used)
        self.nodes.append(NodeProfile(n.name, self._name, target_text(n.target), seconds, new, self._live, peak))
        return result

    def _hold(self, node: torch.fx.Node, result: Any) -> int:
        new = 0
        found = {key: size for key, size in storage_bytes(result).items() if key not in self._theirs}
        for key, size in found.items():
            new += 0 if key in self._users else size
            self._users[key], self._sizes[key] = self._users.get(key, 0) + 1, size
        self._own[node], self._live = list(found), self._live + new
        return new

    def _let_go(self, node: torch.fx.Node) -> None:
        for key in self._own.pop(node, ()):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._live -= self._sizes[key]


@dataclass(frozen=True, eq=False)
class Steps:
    """The graphs of a call.

    Attributes:
        name: What the first one is: "forward" or "inference".
        forward: The first one.
        backward: The backward, if there is one.
        num_forward: How many results of the forward are not saved tensors.
        saved_bytes: Bytes of these.
    """

    name: str
    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule | None = None
    num_forward: int = 0
    saved_bytes: int = 0


def run_steps(steps: Steps, tensors: list[torch.Tensor], nodes: list[NodeProfile]) -> None:
    """Runs the graphs on plain tensors, with cotangents of one; takes every node down, also if a later one fails."""
    results = Watched(steps.forward, steps.name, tensors, 0, nodes).run(*tensors)
    if steps.backward is None:
        return
    saved, theirs = results[steps.num_forward :], storage_bytes(tensors)
    fakes = fake_inputs(steps.backward)[len(saved) :]
    tangents = [torch.ones(fake.shape, dtype=fake.dtype, device=fake.device) for fake in fakes]
    base = sum(size for key, size in storage_bytes(results).items() if key not in theirs)
    Watched(steps.backward, "backward", [*tensors, *results], base, nodes).run(*saved, *tangents)


def _last_uses(gm: torch.fx.GraphModule) -> dict[torch.fx.Node, Sequence[torch.fx.Node]]:
    """Returns for each node the nodes whose value nobody reads after it; itself, if nobody does at all."""
    found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    seen: set[torch.fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        for used in [node, *node.all_input_nodes]:
            if used not in seen:
                seen.add(used)
                found.setdefault(node, []).append(used)
    return found  # type: ignore[return-value]


def _wait_for(result: Any) -> None:
    if any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(result)):
        torch.cuda.synchronize()
