"""The chain of stages from a captured model to code, as `compile` and every later variant run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scoped_fn._plan import Plan
from scoped_fn.stages.apply import apply, apply_backward, apply_forward
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.compile_graph import Compiled, compile_backward, compile_forward, compile_inference
from scoped_fn.stages.lower import Inference, Joint, lower_inference, lower_joint
from scoped_fn.stages.partition import Split, apply_saved, partition
from scoped_fn.state import CompilerState


@dataclass(frozen=True, eq=False)
class Training:
    """The pieces of a call that wants gradients."""

    split: Split
    forward: Compiled
    backward: Compiled

    @property
    def captured(self) -> Captured:
        """What they were made from, with every constant that was read."""
        return self.split.joint.captured


@dataclass(frozen=True, eq=False)
class Forward:
    """The pieces of a call that wants none, or whose outputs depend on nothing that requires one."""

    inference: Inference
    compiled: Compiled

    @property
    def captured(self) -> Captured:
        """What they were made from, with every constant that was read."""
        return self.inference.captured


def compile_captured(state: CompilerState, captured: Captured, plan: Plan) -> tuple[CompilerState, Training | Forward]:
    """Returns the graphs and code of a captured call, every pass applied."""
    if wants_gradient(captured):
        state, training = compile_training(state, captured, plan)
        if training is not None:
            return state, training
    state, inference = lower_inference(state, captured, backend=plan.backend)
    state, inference = apply(state, inference, plan.passes.forward)
    state, compiled = compile_inference(state, inference, plan.backend)
    return state, Forward(inference, compiled)


def compile_training(state: CompilerState, captured: Captured, plan: Plan) -> tuple[CompilerState, Training | None]:
    """Returns the pieces of a call that wants gradients; None if no output depends on what requires one."""
    joint = lower_joint(state, captured, tuple(spec.requires_grad for spec in captured.specs), plan.backend)
    if not joint.tangents:
        return state, None
    state, split = split_joint(state, joint, plan)
    state, forward = compile_forward(state, split, plan.backend)
    state, backward = compile_backward(state, split, plan.backend, forward=forward)
    return state, Training(split, forward, backward)


def split_joint(state: CompilerState, joint: Joint, plan: Plan) -> tuple[CompilerState, Split]:
    """Returns the joint graph in two, every pass applied."""
    state, joint = apply(state, joint, plan.passes.joint)
    state, split = partition(state, joint, plan.passes.partition)
    state, split = apply_saved(state, split, plan.passes.saved)
    state, split = apply_forward(state, split, plan.passes.forward)
    return apply_backward(state, split, plan.passes.backward)


def wants_gradient(captured: Captured) -> bool:
    """Returns whether a call like the captured one is training: grad mode is on and some tensor requires a gradient."""
    return torch.is_grad_enabled() and any(spec.requires_grad for spec in captured.specs)
