"""The stages that `compile` is a chain of, and their artifacts.

Each is `(state, artifact, ...) -> (state, artifact)`, pure and deterministic.
"""

from scoped_fn.stages.apply import apply, apply_backward, apply_forward
from scoped_fn.stages.assemble import assemble_inference, assemble_training
from scoped_fn.stages.autocast import autocast
from scoped_fn.stages.capture import capture
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.compile_graph import Compiled, compile_backward, compile_forward, compile_inference
from scoped_fn.stages.lower import Inference, Joint, lower_inference, lower_training
from scoped_fn.stages.partition import Split, apply_saved, partition

__all__ = [
    "Captured",
    "Compiled",
    "Inference",
    "Joint",
    "Split",
    "apply",
    "apply_backward",
    "apply_forward",
    "apply_saved",
    "assemble_inference",
    "assemble_training",
    "autocast",
    "capture",
    "compile_backward",
    "compile_forward",
    "compile_inference",
    "lower_inference",
    "lower_training",
    "partition",
]
