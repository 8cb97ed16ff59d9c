"""A backend that watches, and checks of what the process holds."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

FUNCTION = torch.autograd.Function
FUNCTION_APPLY = FUNCTION.__dict__.get("apply")


class Watching:
    """A backend that runs graphs as they are and remembers what it compiled and, weakly, what came out.

    Attributes:
        graphs: The text of each graph that it compiled.
        results: For each run, weak references to the results that do not lie in the memory of its inputs.
        memory: For each run and result, where its memory begins, and its bytes; none if it is that of an input.
        settings: For each graph, what `read` returned while it was compiled.
        originals: At each compile and run, whether `torch.autograd.Function` was the original.
    """

    def __init__(self, read: Callable[[], Any] = lambda: None) -> None:
        self.read = read
        self.graphs: list[str] = []
        self.results: list[list[weakref.ref[Tensor]]] = []
        self.memory: list[list[tuple[int, int]]] = []
        self.settings: list[Any] = []
        self.originals: list[bool] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(gm.code)
        self.settings.append(self.read())
        self.originals.append(is_original())

        def run(*tensors: Tensor) -> Any:
            self.originals.append(is_original())
            results = gm(*tensors)
            self.note([one for one in results if isinstance(one, Tensor)], tensors)
            return results

        return run

    def note(self, results: list[Tensor], tensors: Sequence[Tensor]) -> None:
        given = {storage(one) for one in tensors}
        new = [one for one in results if storage(one) not in given]
        self.results.append([weakref.ref(one) for one in new])
        self.memory.append([(storage(one), 0 if storage(one) in given else size(one)) for one in results])

    @property
    def result_bytes(self) -> list[int]:
        """For each run, the bytes of its results that do not lie in the memory of its inputs, each memory once."""
        return [sum(dict(run).values()) for run in self.memory]

    def alive(self, runs: int) -> list[tuple[int, torch.Size]]:
        """Results of the first runs that somebody still holds."""
        found = [(n, ref()) for n, run in enumerate(self.results[: max(runs, 0)]) for ref in run]
        return [(n, one.shape) for n, one in found if one is not None]


def storage(tensor: Tensor) -> int:
    """Where the memory of a tensor begins."""
    return tensor.untyped_storage().data_ptr()


def size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def is_original() -> bool:
    """Whether `torch.autograd.Function` is what torch came with."""
    return torch.autograd.Function is FUNCTION and FUNCTION.__dict__.get("apply") is FUNCTION_APPLY


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """What dies inside dies because nobody holds it, not because the collector came by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
