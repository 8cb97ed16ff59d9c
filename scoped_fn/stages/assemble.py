"""The stages `assemble_training` and `assemble_inference`: code to a `CompiledFn`."""

from __future__ import annotations

from scoped_fn._chain import Training, wants_gradient
from scoped_fn._compiled import CompiledFn
from scoped_fn._plan import Plan
from scoped_fn._runtime import Memo
from scoped_fn._specialize import root_later
from scoped_fn._variants import inference_variant, training_variant
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.compile_graph import Compiled
from scoped_fn.stages.lower import Inference
from scoped_fn.stages.partition import Split
from scoped_fn.state import CompilerState


def assemble_training(
    state: CompilerState,
    captured: Captured,
    split: Split,
    forward: Compiled,
    backward: Compiled,
    *,
    plan: Plan | None = None,
    pristine: Captured | None = None,
) -> tuple[CompilerState, CompiledFn]:
    """Returns the function that runs this forward and backward.

    Args:
        state: Any state; returned as it is.
        captured: What was captured.
        split: The partitioned graph.
        forward: Code of its forward.
        backward: Code of its backward.
        plan: How to compile calls of another kind (shapes, no gradient). Without one they are refused: passes applied
            by hand between stages cannot be repeated.
        pristine: What was captured, before any pass; by default `captured`.
    """
    memo = Memo(plan.on_stale if plan else "recompile")
    memo.captures, memo.compiled_graphs = 1, 2
    captured = split.joint.captured  # with every constant that was read on the way
    root = root_later(captured, plan, memo)
    memo.variants = (training_variant(Training(split, forward, backward), memo, root),)
    return state, CompiledFn(captured.owner, captured, pristine or captured, plan, memo, _split=split)


def assemble_inference(
    state: CompilerState,
    captured: Captured,
    inference: Inference,
    compiled: Compiled,
    *,
    plan: Plan | None = None,
    pristine: Captured | None = None,
) -> tuple[CompilerState, CompiledFn]:
    """Returns the function that runs this inference graph. Arguments are those of `assemble_training`."""
    memo = Memo(plan.on_stale if plan else "recompile")
    memo.captures, memo.compiled_graphs = 1, 1
    kind = "training" if wants_gradient(captured) else "inference"
    memo.variants = (inference_variant(kind, inference, compiled, memo),)
    captured = inference.captured
    return state, CompiledFn(captured.owner, captured, pristine or captured, plan, memo, _inference=inference)
