"""Live bytes of what really runs, by the storages that operations make."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations make inside it, for as long as they live.

    Attributes:
        live: Bytes that are alive now.
        peak: The most there were, looked at when an operation has made its result and nothing is freed yet.
        after: `live` before each operation, so that what the one before it freed is gone.
    """

    def __init__(self, given: Any = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self.after: list[int] = []
        self.known: dict[int, Any] = {}
        for tensor in _tensors(given):
            self.known[id(tensor.untyped_storage())] = tensor.untyped_storage()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.after.append(self.live)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs)):
            self.known.setdefault(id(tensor.untyped_storage()), weakref.ref(tensor.untyped_storage()))
        for tensor in _tensors(out):
            self.made(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def made(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self.known:
            return
        self.live += size

        def freed(_: Any) -> None:
            self.known.pop(key, None)
            self.live -= size

        self.known[key] = weakref.ref(storage, freed)


def peak_of(run: Callable[[], Any], given: Any = ()) -> int:
    """The most bytes that were alive at once while something ran, what it was given left out."""
    counted = LiveBytes(given)
    with counted:
        run()
    return counted.peak


def peak_of_graph(gm: torch.fx.GraphModule, tensors: Sequence[Tensor]) -> int:
    """The same of a graph that runs node by node, each value freed after its last use."""

    def run() -> None:
        torch.fx.Interpreter(gm).run(*tensors)

    with torch.no_grad():
        return peak_of(run, tensors)


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree that have memory: those that are traced with have none."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if type(leaf) in (Tensor, torch.nn.Parameter) and leaf.device.type != "meta"]
