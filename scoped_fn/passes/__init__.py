"""Passes: pure functions from graph to graph, how they combine, and those that trade time for memory.

A pass takes a `torch.fx.GraphModule` and returns one. Stages hand it a copy, so it may edit what it gets.
"""

from scoped_fn.passes.graph_pass import ABSENT, GraphPass, chain, identity, reads_constants
from scoped_fn.passes.guided import GuidedPass
from scoped_fn.passes.levels import PartitionFn, Passes, SavedPass
from scoped_fn.passes.memory_budget import MemoryBudget, memory_budget
from scoped_fn.passes.offload_saved import OffloadSaved, offload_saved
from scoped_fn.passes.order_for_memory import OrderForMemory, order_for_memory

__all__ = [
    "ABSENT",
    "GraphPass",
    "GuidedPass",
    "MemoryBudget",
    "OffloadSaved",
    "OrderForMemory",
    "PartitionFn",
    "Passes",
    "SavedPass",
    "chain",
    "identity",
    "memory_budget",
    "offload_saved",
    "order_for_memory",
    "reads_constants",
]
