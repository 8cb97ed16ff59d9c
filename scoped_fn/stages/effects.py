"""What a pure function may not do: change its arguments, draw hidden random numbers. Found here, and said by name."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.fx

from scoped_fn._errors import MutationError
from scoped_fn._graph import copy_graph, user_line
from scoped_fn._torch.tensors import fake_mode, version
from scoped_fn.stages.captured import Captured


def refuse_mutation(captured: Captured, mutated: tuple[int, ...]) -> None:
    """Raises `MutationError` if the model changes an argument or parameter in place.

    Args:
        captured: The model.
        mutated: Placeholders known to change; when empty, the graph is run on fake tensors to see.
    """
    forbidden = [i for i in mutated if captured.placeholder_kind(i) != "buffer"]
    if mutated and not forbidden:
        return
    index, node = _first_write(captured)
    if index is None and forbidden:
        index = forbidden[0]
    if index is not None:
        _refuse(captured, index, node)


def _refuse(captured: Captured, index: int, node: torch.fx.Node | None) -> NoReturn:
    kind, name = captured.placeholder_kind(index), captured.graph.inputs[index]
    how = f" by {getattr(node.target, '__name__', node.target)}{user_line(node)}" if node else ""
    raise MutationError(
        f"Expected {captured.source.name} not to change its arguments in place, got {kind} {name!r} mutated{how}. "
        "Use the out-of-place operation and return the new value, or keep what changes in a buffer."
    )


def _first_write(captured: Captured) -> tuple[int | None, torch.fx.Node | None]:
    """Returns the first placeholder, other than a buffer, that an operation writes to, and the operation."""
    mode = fake_mode()
    with mode:
        fakes = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=s.device) for s in captured.specs]
        watched = [i for i in range(len(fakes)) if captured.placeholder_kind(i) != "buffer"]
        watch = _WriteWatch(copy_graph(captured.graph.gm), fakes, watched)
        with torch.no_grad():
            watch.run(*fakes)
    return watch.index, watch.node


class _WriteWatch(torch.fx.Interpreter):
    """Runs a graph and remembers the first node after which a watched tensor has a new version."""

    def __init__(self, gm: torch.fx.GraphModule, tensors: list[torch.Tensor], watched: list[int]) -> None:
        super().__init__(gm)
        self.before = [(i, tensors[i], version(tensors[i])) for i in watched]
        self.index: int | None = None
        self.node: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if self.index is None:
            self.index = next((i for i, tensor, before in self.before if version(tensor) != before), None)
            self.node = n if self.index is not None else None
        return result


def refuse_shared_memory(captured: Captured, changed: tuple[str, ...]) -> None:
    """Raises `MutationError` if the model changes a buffer whose memory another buffer or parameter shares.

    In eager both would change; in the state each has memory of its own.
    """
    held = {**captured.source.params, **captured.source.buffers}
    for name in (name for name in changed if name in held):
        other = next((key for key, tensor in held.items() if key != name and _overlap(held[name], tensor)), None)
        if other is not None:
            raise MutationError(
                f"Expected {captured.source.name} to change buffers that own their memory, got {name!r}, which shares "
                f"memory with {other!r}. Register a clone, or compute one from the other in forward."
            )


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    (start, end), (other_start, other_end) = _memory_range(left), _memory_range(right)
    return start < other_end and other_start < end


def _memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
