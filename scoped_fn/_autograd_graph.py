"""Looks into the graphs that plain autograd records."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node


def custom_nodes(outputs: Iterable[torch.Tensor]) -> set[Node]:
    """Returns the nodes behind some tensors that are custom autograd.Functions, or refuse to be differentiated."""
    pending = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += [parent for parent, _ in node.next_functions if parent is not None]
    return {node for node in seen if isinstance(node, BackwardCFunction) or type(node).__name__ == "Error"}


def once_only(outputs: Iterable[torch.Tensor]) -> bool:
    """Returns whether a node behind some tensors refuses to be differentiated."""
    return any(type(node).__name__ == "Error" for node in custom_nodes(outputs))
