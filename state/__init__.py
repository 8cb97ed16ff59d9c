"""`CompilerState` and every pure operation on it.

Everything that changes while models are compiled and trained lives in one immutable value. Each operation takes a
state first and gives the next one back first; the old one stays valid.
"""

if __name__ != "scoped_fn.state":
    raise ImportError(f"Expected to be imported as 'scoped_fn.state', got {__name__!r}. Write: import scoped_fn.state")

from scoped_fn.state.autocast import active_scope, pop_scope, push_scope
from scoped_fn.state.autocast_scope import AutocastScope
from scoped_fn.state.compiler_state import CompilerState, Owner, init_state
from scoped_fn.state.constants import drop_constant, set_constant
from scoped_fn.state.fp8 import describe_fp8, merge
from scoped_fn.state.fp8_state import Fp8State
from scoped_fn.state.frames import Frame, close_frame, open_frame
from scoped_fn.state.frozen_dict import FrozenDict
from scoped_fn.state.input_queue import InputQueue, InputSpec, QueuedInputs
from scoped_fn.state.overrides import drop_override, overrides_of
from scoped_fn.state.owners import OwnershipError, acquire, release, set_buffers
from scoped_fn.state.trees import tree_equal, tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten

__all__ = [
    "AutocastScope",
    "CompilerState",
    "Fp8State",
    "Frame",
    "FrozenDict",
    "InputQueue",
    "InputSpec",
    "Owner",
    "OwnershipError",
    "QueuedInputs",
    "acquire",
    "active_scope",
    "close_frame",
    "describe_fp8",
    "drop_constant",
    "drop_override",
    "init_state",
    "merge",
    "open_frame",
    "overrides_of",
    "pop_scope",
    "push_scope",
    "release",
    "set_buffers",
    "set_constant",
    "tree_equal",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "tree_unflatten",
]
