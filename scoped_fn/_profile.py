"""`Profile`: what each operation of a call costs in time and memory, as a plain value."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

MIB = 2**20
ROWS = 12


@dataclass(frozen=True)
class NodeProfile:
    """One operation.

    Attributes:
        name: Of its node in the graph.
        graph: "forward", "backward" or "inference".
        op: The operator.
        seconds: How long it ran.
        bytes: What it allocated; 0 for a view.
        live_bytes: What was in use after it, beyond the arguments of the call.
        peak_bytes: What was in use while it ran: what it freed afterwards is counted.
    """

    name: str
    graph: str
    op: str
    seconds: float
    bytes: int
    live_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Profile:
    """A call of a compiled function, operation by operation; `print(profile)` is a table.

    Attributes:
        name: The function's name.
        nodes: In the order in which they ran. In the backward all that the forward saved counts as in use, as it is
            until a backward has ended.
        argument_bytes: Bytes of parameters, buffers and inputs, which are in use all the time.
        saved_bytes: Bytes that the forward keeps for the backward.
        synthetic: Whether inputs were made up.
        error: What ended it before its last node; None if nothing did.
    """

    name: str
    nodes: tuple[NodeProfile, ...]
    argument_bytes: int
    saved_bytes: int
    synthetic: bool
    error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether all nodes ran."""
        return self.error is None

    @property
    def seconds(self) -> float:
        """How long all nodes ran."""
        return sum(node.seconds for node in self.nodes)

    @property
    def peak_node(self) -> NodeProfile | None:
        """The node that ran when most was in use; None if none ran."""
        return max(self.nodes, key=lambda node: node.peak_bytes, default=None)

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at once, beyond the arguments of the call."""
        return self.peak_node.peak_bytes if self.peak_node else 0

    def seconds_by_name(self) -> dict[str, float]:
        """Returns how long each node ran; of one that runs again in the backward, its first run."""
        return {node.name: node.seconds for node in reversed(self.nodes)}

    def slowest(self, count: int) -> list[NodeProfile]:
        """Returns the nodes that took most time, the slowest first."""
        return sorted(self.nodes, key=lambda node: -node.seconds)[:count]

    def to_json(self) -> str:
        """Returns everything as JSON; times in seconds."""
        totals = {"complete": self.complete, "seconds": self.seconds, "peak_bytes": self.peak_bytes}
        return json.dumps({**asdict(self), **totals}, indent=2)

    def __str__(self) -> str:
        flags = [] if self.complete else [f"ended early: {self.error}"]
        flags += ["inputs made up"] if self.synthetic else []
        peak = self.peak_node
        lines = [
            f"Profile of {self.name}: {len(self.nodes)} nodes, {1e3 * self.seconds:.1f} ms{_listed(flags)}",
            f"arguments {self.argument_bytes / MIB:.2f} MiB, saved {self.saved_bytes / MIB:.2f} MiB, "
            f"peak beyond arguments {self.peak_bytes / MIB:.2f} MiB"
            + (f" at {peak.name} ({peak.graph})" if peak else ""),
            f"{'node':<40} {'graph':<10} {'ms':>8} {'MiB':>8} {'live MiB':>9}",
        ]
        lines += [
            f"{node.name:<40} {node.graph:<10} {1e3 * node.seconds:>8.3f} {node.bytes / MIB:>8.2f} "
            f"{node.live_bytes / MIB:>9.2f}"
            for node in self.slowest(ROWS)
        ]
        left = len(self.nodes) - ROWS
        return "\n".join([*lines, *([f"... and {left} faster ones"] if left > 0 else [])])


def _listed(flags: list[str]) -> str:
    return f" ({'; '.join(flags)})" if flags else ""
