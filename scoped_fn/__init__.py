"""A functional compiler for PyTorch: no global state, `state, fn = compile(state, model, inputs)`."""

if __name__ != "scoped_fn":
    raise ImportError(f"Expected to be imported as 'scoped_fn', got {__name__!r}. Write: import scoped_fn")

from scoped_fn import passes, stages
from scoped_fn._carry import jvp, vjp, vmap
from scoped_fn._compile import compile
from scoped_fn._compiled import CompiledFn
from scoped_fn._errors import CaptureError, MutationError, RandomOpError, SpecError
from scoped_fn._graph import Graph, copy_graph
from scoped_fn._runtime import CacheInfo
from scoped_fn._transforms import grad, value_and_grad
from scoped_fn.passes import Passes
from scoped_fn.state import CompilerState, OwnershipError, acquire, init_state, release, set_buffers, tree_equal

__version__ = "0.1.0"

__all__ = [
    "CacheInfo",
    "CaptureError",
    "CompiledFn",
    "CompilerState",
    "Graph",
    "MutationError",
    "OwnershipError",
    "Passes",
    "RandomOpError",
    "SpecError",
    "acquire",
    "compile",
    "copy_graph",
    "grad",
    "init_state",
    "jvp",
    "passes",
    "release",
    "set_buffers",
    "stages",
    "tree_equal",
    "value_and_grad",
    "vjp",
    "vmap",
]
