"""Modes of a thread: whether operations are recorded, autocast, hooks for saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _are_functorch_transforms_active as any_transform_active
from torch._C import _DisableAutocast as disable_autocast
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)

__all__ = [
    "any_transform_active",
    "call_as_node",
    "disable_autocast",
    "is_any_autocast_enabled",
    "jit_is_tracing",
    "make_fx",
    "top_saved_tensors_hooks",
    "tracing_proxies",
]

tracing_proxies = get_proxy_mode
jit_is_tracing = torch.jit.is_tracing  # type: ignore[attr-defined]


def call_as_node(code: Callable[[list[Any]], Sequence[Any]], tensors: list[Any]) -> Sequence[Any]:
    """Runs code on real tensors while a graph is being recorded: the call becomes one node of that graph."""
    mode: Any = get_proxy_mode()

    def compiled_call(*given: Any) -> Any:
        return tuple(code(list(given)))

    proxies = [mode.tracer.unwrap_proxy(tensor) for tensor in tensors]
    with disable_proxy_modes_tracing():
        results = compiled_call(*tensors)
    proxy = mode.tracer.create_proxy("call_function", compiled_call, tuple(proxies), {})
    return track_tensor_tree(results, proxy, constant=None, tracer=mode.tracer)
