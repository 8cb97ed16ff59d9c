"""Passes: pure functions from graph to graph, and how they combine.

A pass takes a `torch.fx.GraphModule` and returns one. Stages hand it a copy, so it may edit what it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch.fx

from scoped_fn._errors import SpecError

GraphPass = Callable[[torch.fx.GraphModule], torch.fx.GraphModule]


def identity(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph as it is: the neutral element of `chain`."""
    return gm


def chain(*passes: GraphPass) -> GraphPass:
    """Returns the pass that applies the given ones from left to right; `chain()` is `identity`."""
    for given in passes:
        check_pass(given)
    kept = [p for p in passes if p is not identity]
    if not kept:
        return identity

    def chained(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        for graph_pass in kept:
            gm = graph_pass(gm)
        return gm

    return chained


def check_pass(graph_pass: object, what: str = "pass") -> None:
    """Raises `SpecError` unless the object can be called."""
    if not callable(graph_pass):
        raise SpecError(f"Expected {what} to be a function (gm) -> gm, got {graph_pass!r}. Pass a function.")


@dataclass(frozen=True)
class Passes:
    """The passes that `compile` applies, by level.

    Attributes:
        captured: On the torch-level graph, before any lowering.
        joint: On the ATen graph of forward and backward together, before the partition.
        forward: On the forward graph of training, and on the inference graph.
        backward: On the backward graph.
    """

    captured: GraphPass = identity
    joint: GraphPass = identity
    forward: GraphPass = identity
    backward: GraphPass = identity

    def __post_init__(self) -> None:
        for field in fields(self):
            check_pass(getattr(self, field.name), field.name)


__all__ = ["GraphPass", "Passes", "chain", "identity"]
