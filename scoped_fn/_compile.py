"""`compile`: the chain of stages, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from scoped_fn._backends import Backend, check_backend
from scoped_fn._chain import Training, compile_captured
from scoped_fn._compiled import CompiledFn, normal_mode
from scoped_fn._errors import SpecError
from scoped_fn._guidance import with_passes
from scoped_fn._plan import Plan
from scoped_fn._schedule import Schedule
from scoped_fn._state_check import check_state
from scoped_fn.passes import Passes
from scoped_fn.passes.guided import GuidedPass, as_asked
from scoped_fn.stages.apply import apply
from scoped_fn.stages.assemble import assemble_inference, assemble_training
from scoped_fn.stages.autocast import autocast
from scoped_fn.stages.capture import capture as capture_stage
from scoped_fn.stages.capture import check_option
from scoped_fn.stages.captured import Captured
from scoped_fn.state import CompilerState
from scoped_fn.state.owners import renewed

AnyPasses = Passes | GuidedPass | Sequence[Passes | GuidedPass]


def compile(
    state: CompilerState,
    model_or_fn: Any,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    backend: Backend = "inductor",
    passes: AnyPasses = Passes(),
    schedule: Schedule | None = None,
    step: int = 0,
    capture: str = "dynamo",
    rng: str = "key",
    name: str | None = None,
    owner: int | None = None,
    on_stale: str = "recompile",
) -> tuple[CompilerState, CompiledFn]:
    """Returns the state with a new owner, and the model as a compiled pure function.

    The chain of stages: capture, autocast, lower, partition, compile, assemble. If grad mode is on and a parameter or
    input requires a gradient, forward and backward are compiled, both now; otherwise the forward alone. Calls of
    another kind (other shapes, other Python numbers, with or without gradients, in another autocast scope) compile when
    they first come, once. Each compile runs under the overrides that the owner has in the state of that call.

    Args:
        state: Any state. It stays valid, also when this raises.
        model_or_fn: A `torch.nn.Module`, or a function of structured tensors. A module is read, never written to.
        inputs: Example positional arguments, a tuple. Only structure, shapes, dtypes and devices matter, except to
            passes that need a profile: for these the model runs on them, forward and backward if it can be trained.
        kwargs: Example keyword arguments.
        backend: "inductor"; "eager", which runs the graphs as they are; or `(gm, example_inputs) -> callable`.
        passes: Pure graph passes, by level; guided passes such as `passes.memory_budget`; or a sequence of both.
        schedule: Passes by step, for `advance`. The entry that is due at `step` is in force, or `passes` if none is.
        step: Where the schedule begins, for a run that is resumed.
        capture: "dynamo", or "trace" for Python code that Dynamo refuses.
        rng: "key": random operations draw from the state's key, and calls return the state with the next one;
            docs/random.md says how. "torch" lets them draw from torch's generators, as eager does. That is impure: the
            result depends on the generator, not on the state.
        name: What messages call the owner; by default the class or function's name.
        owner: A token from `acquire`, for overrides before the first compile; by default a new one.
        on_stale: What a call does whose state has another value of a constant that its code read: "recompile", or
            "error", which raises `StaleConstant`.

    Raises:
        CaptureError: The model is not one pure graph. `MutationError` and `RandomOpError` are kinds of it.
        SpecError: An option or input is not what it should be, or passes do not fit together.
        OwnershipError: The state does not hold the owner, or it has a function.

    Example:
        >>> import torch, scoped_fn as sf
        >>> state, fn = sf.compile(sf.init_state(), lambda x: x * 2, (torch.ones(3),), backend="eager")
        >>> state, doubled = fn(state, torch.arange(3.0))
        >>> doubled
        tensor([0., 2., 4.])
    """
    check_state(state)
    check_backend(backend)
    check_option("on_stale", on_stale, ("recompile", "error"))
    plan = _plan(Plan(backend, Passes(), capture, base=as_asked(passes), on_stale=on_stale), schedule, step)
    with normal_mode(torch.is_grad_enabled()):
        state, pristine = capture_stage(
            state, model_or_fn, inputs, kwargs, name=name, mode=capture, rng=rng, owner=owner
        )
    plan = with_passes(state, pristine, plan, (inputs, kwargs or {}, False))
    if plan.entry is not None:
        state = renewed(state, pristine.owner, entry=plan.entry)
    return compile_pristine(state, pristine, plan)


def compile_pristine(state: CompilerState, pristine: Captured, plan: Plan) -> tuple[CompilerState, CompiledFn]:
    """Returns the compiled function of a captured model."""
    plan, ambient = plan.seen_from(state, pristine.owner), pristine.ambient
    if torch.get_default_dtype() is not ambient.dtype:
        raise SpecError(
            f"Expected the default dtype {ambient.dtype} that {pristine.source.name} was captured under, got "
            f"{torch.get_default_dtype()}. Set it back, or compile anew."
        )
    with normal_mode(pristine.grad_mode), ambient.restored():
        state, captured = apply(state, pristine, plan.passes.captured)
        state, captured = autocast(state, captured)
        state, pieces = compile_captured(state, captured, plan)
        options: Any = {"plan": plan, "pristine": pristine}
        if isinstance(pieces, Training):
            return assemble_training(state, captured, pieces.split, pieces.forward, pieces.backward, **options)
        return assemble_inference(state, captured, pieces.inference, pieces.compiled, **options)


def _plan(plan: Plan, schedule: Any, step: int) -> Plan:
    """Returns the plan with the passes that are in force at a step."""
    if schedule is None:
        return replace(plan, asked=plan.base)
    if not isinstance(schedule, Schedule):
        raise SpecError(f"Expected a Schedule, got a {type(schedule).__name__}. Write sf.Schedule([(0, passes), ...]).")
    return in_force(replace(plan, schedule=schedule), schedule.due(step))


def in_force(plan: Plan, entry: int | None) -> Plan:
    """Returns the plan with an entry of its schedule in force; None for none."""
    entries = plan.schedule.entries if plan.schedule is not None else ()
    return replace(plan, entry=entry, asked=plan.base if entry is None else entries[entry][1])
