"""`CompilerState` and every pure operation on it.

Everything that changes while models are compiled and trained lives in one immutable value. Each operation takes a
state first and gives the next one back first; the old one stays valid.
"""

if __name__ != "scoped_fn.state":
    raise ImportError(f"Expected to be imported as 'scoped_fn.state', got {__name__!r}. Write: import scoped_fn.state")

from scoped_fn.state.autocast import active_scope, pop_scope, push_scope
from scoped_fn.state.autocast_scope import AutocastScope
from scoped_fn.state.compiler_state import CompilerState, Owner, init_state
from scoped_fn.state.fp8 import describe_fp8, merge
from scoped_fn.state.fp8_state import Fp8State
from scoped_fn.state.frozen_dict import FrozenDict
from scoped_fn.state.owners import OwnershipError, acquire, release, set_buffers
from scoped_fn.state.trees import tree_equal, tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten

__all__ = [
    "AutocastScope",
    "CompilerState",
    "Fp8State",
    "FrozenDict",
    "Owner",
    "OwnershipError",
    "acquire",
    "active_scope",
    "describe_fp8",
    "init_state",
    "merge",
    "pop_scope",
    "push_scope",
    "release",
    "set_buffers",
    "tree_equal",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "tree_unflatten",
]
