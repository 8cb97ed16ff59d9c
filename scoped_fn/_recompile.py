"""`recompile` and `advance`: the same model with other passes, from where it was captured."""

from __future__ import annotations

from dataclasses import replace

from scoped_fn._compile import AnyPasses, compile_pristine, in_force
from scoped_fn._compiled import CompiledFn
from scoped_fn._errors import SpecError
from scoped_fn._guidance import check_fn
from scoped_fn._guidance import profile as profile_of
from scoped_fn._plan import Plan
from scoped_fn._profile import Profile
from scoped_fn.passes.guided import as_asked, needs_profile, resolve
from scoped_fn.stages.capture import check_type
from scoped_fn.state import CompilerState
from scoped_fn.state.owners import renewed


def recompile(
    state: CompilerState, fn: CompiledFn, passes: AnyPasses | None = None, *, profile: Profile | None = None
) -> tuple[CompilerState, CompiledFn]:
    """Returns the state, and the function compiled once more, for the same owner: its generation goes up by one.

    It starts from the captured model, `fn.pristine`, so passes replace those of before. Autocast scopes, overrides and
    constants are those of the state. `fn` goes on working, and so do its backwards that wait.

    Args:
        state: A state that holds the function.
        fn: What `compile` returned.
        passes: As in `compile`; None for those that `fn` has. They hold until the next `advance` of a function that has
            a schedule.
        profile: For passes that need one; by default one is made, on the owner's queued inputs or made-up ones.

    Raises:
        SpecError: The function was assembled by hand, or passes do not fit together.
        OwnershipError: The state does not hold the function.

    Example:
        >>> import torch, scoped_fn as sf
        >>> state, fn = sf.compile(sf.init_state(), torch.nn.Linear(2, 2), (torch.ones(1, 2),), backend="eager")
        >>> state, ordered = sf.recompile(state, fn, sf.passes.order_for_memory())
        >>> state.owners[ordered.owner].generation, ordered.pristine is fn.pristine
        (1, True)
    """
    plan = _plan_of(state, fn)
    if passes is not None:
        plan = replace(plan, asked=as_asked(passes), entry=None)
    if profile is not None:
        check_type("profile as", profile, Profile, "Pass what sf.profile returned.")
    return _again(state, fn, plan, profile)


def advance(state: CompilerState, fn: CompiledFn, step: int) -> tuple[CompilerState, CompiledFn]:
    """Returns the state, and the function with the entry of its schedule in force that is due at a step.

    The newest entry that is due counts, so a run that is resumed at a later step gets it at once. If that is the one in
    force already, the very same state and function come back.

    Args:
        state: A state that holds the function.
        fn: A function that was compiled with a schedule.
        step: Which step comes next, counted from 0.

    Raises:
        SpecError: The function has no schedule, or the step is no whole number of 0 or more.
        OwnershipError: The state does not hold the function.
    """
    plan = _plan_of(state, fn)
    if plan.schedule is None:
        raise SpecError(f"Expected {fn.name} to have a schedule, got none. Compile with schedule=sf.Schedule(...).")
    entry = plan.schedule.due(step)
    if entry != plan.entry:
        return _again(state, fn, in_force(plan, entry), None)
    return (state if state.owners[fn.owner].entry == entry else renewed(state, fn.owner, entry=entry)), fn


def _plan_of(state: CompilerState, fn: CompiledFn) -> Plan:
    check_fn(state, fn)
    plan = fn.origin.plan
    if plan is None:
        raise SpecError(
            f"Expected a function that compile made, got {fn.name}, which was assembled by hand: its passes cannot be "
            "repeated. Use sf.compile."
        )
    return plan


def _again(
    state: CompilerState, fn: CompiledFn, plan: Plan, profile: Profile | None
) -> tuple[CompilerState, CompiledFn]:
    if profile is None and needs_profile(plan.asked):
        state, profile = profile_of(state, replace(fn, _plan=plan.without_guided))
    plan = replace(plan, passes=resolve(plan.asked, profile))
    state = renewed(state, fn.owner, generation=state.owners[fn.owner].generation + 1, entry=plan.entry)
    return compile_pristine(state, fn.pristine, plan)
