"""`offload_saved`: what the forward saves waits for the backward in the host's memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.fx

from scoped_fn._errors import SpecError
from scoped_fn._graph import copy_graph, fake_inputs, fake_value, output_values, storage_bytes
from scoped_fn._torch.tensors import fake_mode_of
from scoped_fn.passes.guided import GuidedPass
from scoped_fn.passes.levels import Halves, Passes

if TYPE_CHECKING:
    from scoped_fn._profile import Profile

OFFLOADED = "offloaded"
TO_DEVICE = torch.ops.prims.device_put.default
HOST = torch.device("cpu")


def offload_saved(bytes: int) -> OffloadSaved:  # noqa: A002 - the plain word for what is counted
    """Returns the pass that moves saved tensors to the host after the forward, and back before their first use.

    Those that wait longest go first: what the backward takes last. On a CPU a copy stands in for the move.

    Args:
        bytes: How many bytes to move at least; all that is saved, if there is less.

    Raises:
        SpecError: The number is negative or no whole number.

    Example:
        >>> offload_saved(2**20)
        OffloadSaved(bytes=1048576)
    """
    return OffloadSaved(bytes)


@dataclass(frozen=True)
class OffloadSaved(GuidedPass):
    """What `offload_saved` returns.

    Attributes:
        bytes: How many bytes to move at least.
    """

    bytes: int

    name: ClassVar[str] = "offload_saved"
    conflicts: ClassVar[frozenset[str]] = frozenset({"offload_saved"})

    def __post_init__(self) -> None:
        if not isinstance(self.bytes, int) or isinstance(self.bytes, bool) or self.bytes < 0:
            raise SpecError(f"Expected a whole number of bytes, 0 or more, got {self.bytes!r}. 2**30 is one GiB.")

    def passes(self, profile: Profile | None) -> Passes:
        """Returns the change of what is saved."""
        return Passes(saved=partial(offload, self.bytes))


def offload(wanted: int, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, num_forward: int) -> Halves:
    """Returns forward and backward with copies to the host, and back."""
    forward, backward = copy_graph(forward), copy_graph(backward)
    saved = output_values(forward)[num_forward:]
    placeholders = backward.graph.find_nodes(op="placeholder")
    for i in chosen(wanted, forward, backward, num_forward):
        saved[i] = _to_host(forward.graph, saved[i])
        _from_host(backward.graph, placeholders[i], saved[i])
    forward.graph.output_node().args = ((*output_values(forward)[:num_forward], *saved),)
    forward.recompile()
    backward.recompile()
    return forward, backward


def chosen(wanted: int, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, num_forward: int) -> list[int]:
    """Returns which saved values go to the host, the one that waits longest first."""
    values = output_values(forward)
    first_use = _first_uses(backward, len(values) - num_forward)
    moved = storage_bytes([*fake_inputs(forward), *map(fake_value, values[:num_forward])]).keys()
    picked: list[int] = []
    for i in sorted(range(len(first_use)), key=lambda i: -first_use[i]):
        sizes = storage_bytes(fake_value(values[num_forward + i]))
        if wanted > 0 and not sizes.keys() & moved:
            picked.append(i)
            wanted -= sum(sizes.values())
    return picked


def _first_uses(backward: torch.fx.GraphModule, count: int) -> list[int]:
    place = {node: i for i, node in enumerate(backward.graph.nodes)}
    saved = backward.graph.find_nodes(op="placeholder")[:count]
    return [min((place[user] for user in node.users), default=0) for node in saved]


def _to_host(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    """Returns the copy of a value on the host, made right after it."""
    with graph.inserting_after(node):
        copy = _moved(graph, node, HOST)
    copy.name = f"{node.name}_on_host"
    copy.meta[OFFLOADED] = True
    return copy


def _from_host(graph: torch.fx.Graph, taken: torch.fx.Node, on_host: torch.fx.Node) -> None:
    """Makes the backward take a value from the host, and bring it back before its first use."""
    device, users = fake_value(taken).device, list(taken.users)
    taken.meta = dict(on_host.meta)
    place = {node: i for i, node in enumerate(graph.nodes)}
    if users:
        with graph.inserting_before(min(users, key=lambda node: place[node])):
            back = _moved(graph, taken, device)
        for user in users:
            user.replace_input_with(taken, back)


def _moved(graph: torch.fx.Graph, node: torch.fx.Node, device: torch.device) -> torch.fx.Node:
    """Returns a copy on a device; of what is there already, a clone."""
    fake = fake_value(node)
    here = fake.device == device
    operation = torch.ops.aten.clone.default if here else TO_DEVICE
    target = () if here else (device,)
    made = graph.call_function(operation, (node, *target))
    with fake_mode_of([fake]):
        made.meta = {"val": operation(fake, *target)}
    return made
