"""`profile`, and the passes of a compile that are made from one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from scoped_fn._call import Call
from scoped_fn._chain import split_joint
from scoped_fn._compiled import CompiledFn, normal_mode
from scoped_fn._errors import SpecError
from scoped_fn._graph import storage_bytes
from scoped_fn._inputs import materialize, pop_inputs
from scoped_fn._node_by_node import Steps, run_steps
from scoped_fn._plan import Plan
from scoped_fn._profile import NodeProfile, Profile
from scoped_fn._runtime import Memo
from scoped_fn._specialize import Origin, recapture
from scoped_fn._state_check import check_state
from scoped_fn._structure import unflatten
from scoped_fn._torch.levels import apart
from scoped_fn._torch.tracing import disable_autocast
from scoped_fn._whole_step import WholeStep
from scoped_fn.passes.guided import needs_profile, resolve
from scoped_fn.stages.apply import apply
from scoped_fn.stages.capture import check_option
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.lower import lower_inference, lower_joint
from scoped_fn.state import CompilerState, InputSpec
from scoped_fn.state.owners import check_owner

Inputs = tuple[tuple[Any, ...], dict[str, Any], bool]

RUNS = 3  # the first run of anything is slow, and any run can be held up


def profile(state: CompilerState, fn: Any, *, training: bool | None = None) -> tuple[CompilerState, Profile]:
    """Returns the state without the inputs that were used, and what each operation of a call costs.

    The function's graphs run node by node: forward and backward, as autograd runs them, or the inference graph; three
    times, and the shortest time of each node counts. Inputs come from the owner's queue, see `push_inputs`; from an
    empty one they are made up, and the profile says so. Nothing else changes: no random generator, no buffer, no scale.

    Args:
        state: A state that holds the function.
        fn: A compiled function, or `value_and_grad` of one.
        training: Whether to run forward and backward; by default if a parameter or input requires a gradient.

    Returns:
        A profile that is not complete if an operation fails, on made-up inputs for instance.

    Raises:
        SpecError: The queued inputs are not what the function takes.
        OwnershipError: The state does not hold the function.
    """
    fn = fn.fn if isinstance(fn, WholeStep) else fn
    check_fn(state, fn)
    check_option("training", training, (None, True, False))
    with apart():
        state, inputs = _inputs_for(state, fn)
    try:
        return state, profile_call(state, fn, inputs, training)
    except SpecError as error:
        if inputs[2]:
            raise
        advice = "It came from the queue of inputs; take it out: state, _ = sf.take_inputs(state, fn)."
        raise SpecError(f"{error} {advice}") from error


def check_fn(state: CompilerState, fn: Any) -> None:
    """Raises `SpecError` unless `fn` is a compiled function, and `OwnershipError` unless the state holds it."""
    check_state(state)
    if not isinstance(fn, CompiledFn):
        raise SpecError(f"Expected a compiled function, got a {type(fn).__name__}. Pass what compile returned.")
    check_owner(state, fn.owner, fn.name)


def with_passes(state: CompilerState, pristine: Captured, plan: Plan, inputs: Inputs) -> Plan:
    """Returns the plan with the passes that it asks for, made from a profile of these inputs where they need one."""
    profile = None
    if needs_profile(plan.asked):
        draft = CompiledFn(pristine.owner, pristine, pristine, plan.without_guided, Memo())
        profile = profile_call(state, draft, inputs)
    return replace(plan, passes=resolve(plan.asked, profile))


def profile_call(state: CompilerState, fn: CompiledFn, inputs: Inputs, training: bool | None = None) -> Profile:
    """Returns the profile of one call."""
    args, kwargs, synthetic = inputs
    with apart(), normal_mode(True):
        call = fn.bind(state, (fn.params, *args) if fn.captured.source.is_module else args, kwargs)
        steps, tensors = _steps(fn, call, training)
        runs: list[list[NodeProfile]] = []
        error = None
        try:
            devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
            with torch.random.fork_rng(devices), torch.no_grad(), disable_autocast():
                for _ in range(RUNS):
                    runs.append(nodes := list[NodeProfile]())
                    run_steps(steps, tensors, nodes)
        except Exception as failure:  # noqa: BLE001 - whatever an operation raises, training goes on
            error = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
    nodes = [min(same, key=lambda node: node.seconds) for same in zip(*runs, strict=False)]
    return Profile(fn.name, tuple(nodes), sum(storage_bytes(tensors).values()), steps.saved_bytes, synthetic, error)


def _steps(fn: CompiledFn, call: Call, training: bool | None) -> tuple[Steps, list[torch.Tensor]]:
    """Returns the graphs of a call as they are compiled, and the tensors that they take."""
    wanted = [tensor.requires_grad for tensor in call.tensors]
    if training and not any(wanted):
        wanted = [tensor.is_floating_point() or tensor.is_complex() for tensor in call.tensors]
    training = any(wanted) if training is None else training
    memo = Memo()  # what is captured here is not kept
    with torch.set_grad_enabled(training):  # the stages set the owner's overrides
        captured, plan = recapture(Origin(fn.captured, fn.origin.plan, memo), call, wanted)
        captured = call.in_fp8(captured, call.fit(memo, captured), record=training)
        steps = _training_steps(captured, wanted, plan) if training else None
        if steps is None:
            _, inference = lower_inference(plan.settings, captured, backend=plan.backend)
            _, inference = apply(plan.settings, inference, plan.passes.forward)
            steps = Steps("inference", inference.graph.gm)
    return steps, [tensor.detach() for tensor in captured.with_constants(call.tensors)]


def _training_steps(captured: Captured, wanted: list[bool], plan: Plan) -> Steps | None:
    flags = captured.with_constants(wanted, [False] * len(captured.constants))
    flags += [False] * (len(captured.specs) - len(flags))
    joint = lower_joint(plan.settings, captured, tuple(flags), plan.backend)
    if not joint.tangents:
        return None
    _, split = split_joint(plan.settings, joint, plan)
    return Steps("forward", split.forward.gm, split.backward.gm, joint.num_forward, split.saved_bytes)


def _inputs_for(state: CompilerState, fn: CompiledFn) -> tuple[CompilerState, Inputs]:
    """Returns the state without the inputs of one call, and these; made-up ones if the queue is empty."""
    captured, queue = fn.captured, state.inputs.get(fn.owner)
    if queue is not None and queue.entries:
        state, entry = pop_inputs(state, fn.owner)
        args, kwargs = unflatten(entry.structure, list(entry.tensors))
        return state, (args, kwargs, False)
    structure = replace(captured.in_structure, scope=None)
    specs = captured.specs[captured.num_held :][: structure.num_tensors]
    made = materialize(InputSpec(structure, specs) if queue is None else queue.spec, state.key)
    return state, (tuple(made), made.kwargs, True)
