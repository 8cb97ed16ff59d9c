"""Nodes of autograd at one level, and the backward that runs them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._C._autograd import _get_current_graph_task_keep_graph as graph_is_kept
from torch._C._functorch import maybe_get_level
from torch._functorch.eager_transforms import _autograd_grad
from torch._functorch.utils import enable_single_level_autograd_function as single_level_allowed
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction

from scoped_fn._torch.levels import Level

__all__ = ["SingleLevelFunction", "graph_is_kept", "has_every_rule", "is_last_backward", "single_level_allowed"]


def has_every_rule(node: Any) -> bool:
    """Returns whether a node is of a custom autograd.Function with rules for gradients, tangents and batches."""
    function: Any = getattr(type(node), "_forward_cls", torch.autograd.Function)
    return all(
        getattr(function, rule) is not getattr(torch.autograd.Function, rule)
        for rule in ("setup_context", "backward", "jvp", "vmap")
    )


def is_last_backward(level: Level | None, argument: torch.Tensor) -> bool:
    """Returns whether the backward that runs is that of `torch.func.grad` itself for a level.

    Not if the level has ended: another may have its number by now, but does not wrap what it wrapped.

    It is the last thing that happens at the level, so what it computes there is not differentiated there again.
    """
    if level is None or maybe_get_level(argument) != level.number:
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.autograd.grad.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_back.f_code is _autograd_grad.__code__
