"""A functional compiler for PyTorch: no global state, `state, fn = compile(state, model, inputs)`."""

if __name__ != "scoped_fn":
    raise ImportError(f"Expected to be imported as 'scoped_fn', got {__name__!r}. Write: import scoped_fn")

from scoped_fn import passes, random, recipes, stages
from scoped_fn._carry import jvp, vjp, vmap
from scoped_fn._checkpoint import from_tensors, load, save, to_tensors
from scoped_fn._compile import compile
from scoped_fn._compiled import CompiledFn
from scoped_fn._detect import detect
from scoped_fn._engine import Engine
from scoped_fn._errors import CaptureError, CheckpointError, MutationError, RandomOpError, SpecError, StaleConstant
from scoped_fn._fp8.quantized_params import QuantizedParams
from scoped_fn._fp8.scales import update_scales
from scoped_fn._fp8.scopes import autocast, end_autocast, with_autocast
from scoped_fn._fp8.sinks import stage_gradients, watch_gradients
from scoped_fn._fp8.support import fp8_support
from scoped_fn._fp8.weights import quantize_weights
from scoped_fn._graph import Graph, copy_graph
from scoped_fn._guidance import profile
from scoped_fn._inputs import SyntheticInputs, materialize, push_inputs, take_inputs
from scoped_fn._overrides import effects, set_override
from scoped_fn._profile import NodeProfile, Profile
from scoped_fn._recompile import advance, recompile
from scoped_fn._runtime import CacheInfo
from scoped_fn._schedule import Schedule
from scoped_fn._transforms import grad, value_and_grad
from scoped_fn.passes import ABSENT, Passes
from scoped_fn.random import fold_in, next_key, split
from scoped_fn.recipes import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    QuantizerRole,
)
from scoped_fn.state import (
    AutocastScope,
    CompilerState,
    Fp8State,
    Frame,
    InputSpec,
    OwnershipError,
    acquire,
    close_frame,
    describe_fp8,
    drop_constant,
    drop_override,
    init_state,
    merge,
    open_frame,
    overrides_of,
    release,
    set_buffers,
    set_constant,
    tree_equal,
)

__version__ = "0.1.0"

__all__ = [
    "ABSENT",
    "AutocastScope",
    "CacheInfo",
    "CaptureError",
    "CheckpointError",
    "CompiledFn",
    "CompilerState",
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingRequest",
    "Engine",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "Fp8State",
    "Frame",
    "Graph",
    "InputSpec",
    "MMParams",
    "MXFP8BlockScaling",
    "MutationError",
    "NVFP4BlockScaling",
    "NodeProfile",
    "OwnershipError",
    "Passes",
    "Profile",
    "QParams",
    "QuantizedParams",
    "QuantizerRole",
    "RandomOpError",
    "Schedule",
    "SpecError",
    "StaleConstant",
    "SyntheticInputs",
    "acquire",
    "advance",
    "autocast",
    "close_frame",
    "compile",
    "copy_graph",
    "describe_fp8",
    "detect",
    "drop_constant",
    "drop_override",
    "effects",
    "end_autocast",
    "fold_in",
    "fp8_support",
    "from_tensors",
    "grad",
    "init_state",
    "jvp",
    "load",
    "materialize",
    "merge",
    "next_key",
    "open_frame",
    "overrides_of",
    "passes",
    "profile",
    "push_inputs",
    "quantize_weights",
    "random",
    "recipes",
    "recompile",
    "release",
    "save",
    "set_buffers",
    "set_constant",
    "set_override",
    "split",
    "stage_gradients",
    "stages",
    "take_inputs",
    "to_tensors",
    "tree_equal",
    "update_scales",
    "value_and_grad",
    "vjp",
    "vmap",
    "watch_gradients",
    "with_autocast",
]
