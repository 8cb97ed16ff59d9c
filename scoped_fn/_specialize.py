"""New variants of a compiled function, and the errors of calls that cannot have one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from scoped_fn._ambient import ambient_settings
from scoped_fn._call import Call
from scoped_fn._chain import Training, compile_captured
from scoped_fn._errors import CaptureError, MutationError, RandomOpError, SpecError
from scoped_fn._frozen_module import replace_tensors
from scoped_fn._plan import Plan
from scoped_fn._root import Root
from scoped_fn._runtime import Memo, Variant
from scoped_fn._source import Source, buffer_places, unset_buffers
from scoped_fn._specs import laid_out, spec_of
from scoped_fn._structure import Structure
from scoped_fn._torch.config import patched
from scoped_fn._torch.dynamo import compile_lock
from scoped_fn._torch.levels import apart
from scoped_fn._torch.wrapped import is_wrapped
from scoped_fn._variants import inference_variant, training_variant, transform_variant
from scoped_fn.stages.apply import apply
from scoped_fn.stages.capture import capture_call, describe_inputs
from scoped_fn.stages.captured import Captured
from scoped_fn.state import CompilerState, FrozenDict, OwnershipError, overrides_of

if TYPE_CHECKING:
    from scoped_fn._compiled import CompiledFn


@dataclass(frozen=True, eq=False)
class Origin:
    """Where the variants of a compiled function come from.

    Attributes:
        first: The graph of the first call.
        plan: How to compile; None for a function assembled by hand.
        memo: Its variants and counters.
    """

    first: Captured
    plan: Plan | None
    memo: Memo


def plain_variant(origin: Origin, kind: str, call: Call) -> Variant:
    """Returns the training or inference variant for a call; makes it once."""
    memo, wanted = origin.memo, [t.requires_grad for t in call.tensors]

    def make() -> Variant:
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            captured, plan = recapture(origin, call, wanted)
            before, sites = call.structure, call.fit(memo, captured)
            known = memo.find(kind, call)
            if call.structure is not before and known is not None:
                return known
            captured = call.in_fp8(captured, sites, record=kind != "inference")
            _, pieces = compile_captured(plan.settings, captured, plan)
        if isinstance(pieces, Training):
            memo.compiled_graphs += 2
            return training_variant(pieces, memo, root_later(pieces.captured, plan, memo))
        memo.compiled_graphs += 1
        return inference_variant(kind, pieces.inference, pieces.compiled, memo)

    return memo.find_or_make(kind, call, make)


def transforming_variant(origin: Origin, call: Call, tracked: tuple[bool, ...]) -> Variant:
    """Returns the variant for a call with tensors of any `torch.func` level; makes it once.

    Args:
        origin: What was compiled.
        call: The call.
        tracked: Which of its tensors a derivative may be taken of.
    """
    memo, kind = origin.memo, ("transform", tracked)
    found = memo.find(kind, call)
    if found is not None:
        return found
    try:
        return _transforming_variant(origin, call, tracked)
    except TakesKeyError:
        call.take_key(memo)  # at the caller's levels
        at = len(call.tensors) - 1 - (call.scope.extras if call.scope else 0)
        return transforming_variant(origin, call, (*tracked[:at], False, *tracked[at:]))


class TakesKeyError(Exception):
    """A new kind of call turns out to draw random numbers."""


def _transforming_variant(origin: Origin, call: Call, tracked: tuple[bool, ...]) -> Variant:
    memo, kind = origin.memo, ("transform", tracked)
    specs = [laid_out(tensor) for tensor in call.tensors]
    ambient = ambient_settings("training")

    def make() -> Variant:
        seen = tuple(replace(spec, requires_grad=t) for spec, t in zip(specs, tracked, strict=True))
        for variant in memo.variants:
            if (
                variant.root
                and variant.kind == "training"
                and variant.serves(ambient, call.structure, seen, call.state.constants)
            ):
                return transform_variant(tracked, variant.root())
        with torch.inference_mode(False), torch.enable_grad():
            captured, plan = recapture(origin, stand_in, list(tracked))
            if captured.keyed and not call.structure.keyed:
                memo.learn_key(call.structure)
                raise TakesKeyError
            before, sites = call.structure, call.fit(memo, captured)
            if call.structure is not before:  # it takes scales that were not known of
                return transforming_variant(origin, call, (*tracked, False, False)[: len(call.tensors)])
            captured = call.in_fp8(captured, sites, record=any(tracked))
            return transform_variant(tracked, Root(captured, plan, memo, ambient))

    with apart():
        stand_in = replace(call, tensors=[spec.stand_in() for spec in specs])
        return memo.find_or_make(kind, stand_in, make)


def root_later(captured: Captured, plan: Plan | None, memo: Memo) -> Callable[[], Root]:
    """Returns the function that makes, when it is first called, what higher derivatives of a call are derived from."""
    made: list[Root] = []

    def root() -> Root:
        if plan is None:
            raise SpecError(
                f"Expected one derivative of {captured.source.name}, which was assembled by hand, got a request for "
                "more, which the passes applied by hand would miss. Use sf.compile."
            )
        with compile_lock:
            if not made:
                made.append(Root(captured, plan, memo, captured.ambient))
        return made[0]

    return root


def recapture(origin: Origin, call: Call, wanted: list[bool]) -> tuple[Captured, Plan]:
    """Returns the graph of a new kind of call, with the passes for it applied, and the plan for the rest.

    Args:
        origin: What was compiled.
        call: The call.
        wanted: For each of its tensors, whether the model shall see one that requires a gradient.
    """
    captured, plan = capture_again(origin, call, wanted)
    _, captured = apply(plan.settings, captured, plan.passes.captured)
    return captured, plan


def capture_again(origin: Origin, call: Call, wanted: list[bool]) -> tuple[Captured, Plan]:
    """Returns the graph of a new kind of call as the model is; arguments are those of `recapture`."""
    first, plan, source = origin.first, origin.plan, origin.first.source
    structure, tensors = call.structure, call.tensors
    num_held = len(source.params) + len(source.buffers)
    check_held(source, tensors[:num_held])
    inputs = tensors[num_held : num_held + structure.num_tensors]  # what follows them in FP8 is no input of the model
    inputs = [t.detach().requires_grad_(w) for t, w in zip(inputs, wanted[num_held:], strict=False)]
    if plan is None:
        raise SpecError(
            f"Expected inputs like those that {source.name} was assembled for ({_shown(first)}), got "
            f"{_texts(source, structure, inputs)}. Functions assembled by hand have one kind of call: use sf.compile."
        )
    plan = plan.seen_from(call.state, first.owner)
    seen = as_called(source, tensors[:num_held], wanted[:num_held])
    plain, device = replace(structure, scope=None), call.state.key.device
    try:
        with patched(overrides_of(call.state, first.owner)):
            captured = capture_call(first.owner, seen, plain, inputs, mode=plan.capture, rng=first.rng, device=device)
    except (MutationError, RandomOpError):
        raise
    except CaptureError as error:
        raise SpecError(
            f"Expected inputs like those that {source.name} was compiled for ({_shown(first)}), got "
            f"{_texts(source, structure, inputs)}, which it cannot take. {error}"
        ) from error
    origin.memo.captures += 1
    return replace(captured, source=source), plan


def as_called(source: Source, held: list[torch.Tensor], wanted: list[bool]) -> Source:
    """Returns the source with parameters and buffers as a call has them; the user's module is not touched.

    Args:
        source: What was compiled.
        held: The call's parameters and buffers.
        wanted: For each of them, whether it shall require a gradient.
    """
    swaps: dict[str, torch.Tensor] = {}
    for (name, own), given, grad in zip({**source.params, **source.buffers}.items(), held, wanted, strict=True):
        if own.requires_grad is not grad or own.stride() != given.stride():
            plain = given.detach()
            is_param = name in source.params
            swaps[name] = torch.nn.Parameter(plain, grad) if is_param else plain.requires_grad_(grad)
    if not swaps:
        return source
    every = {**source.params, **source.buffers}
    call = replace_tensors(source.call, {id(every[name]): new for name, new in swaps.items()})  # type: ignore[arg-type]
    return replace(
        source,
        call=call,
        params={name: cast(torch.nn.Parameter, swaps.get(name, own)) for name, own in source.params.items()},
        buffers={name: swaps.get(name, own) for name, own in source.buffers.items()},
        buffer_places=buffer_places(call, source.buffers),
        unset_buffers=unset_buffers(call),
    )


def buffers_of(fn: CompiledFn, state: CompilerState) -> list[torch.Tensor]:
    """Returns the buffers of a function from a state, in order; raises `OwnershipError` if one is missing."""
    held, names = state.buffers.get(fn.owner, FrozenDict()), fn.captured.source.buffers
    try:
        return [held[name] for name in names]
    except KeyError as error:
        raise OwnershipError(
            f"Expected buffer {error} of owner {fn.owner} ({fn.name}) in the state, got {sorted(held) or 'none'}. "
            "Pass one state through every call; after set_buffers it must hold every buffer."
        ) from None


def resolve_params(fn: CompiledFn, params: Any) -> list[torch.Tensor]:
    """Returns the parameters in order from a dict that uses further names of tied ones; raises for any other."""
    source = fn.captured.source
    if not isinstance(params, Mapping):
        raise SpecError(
            f"Expected params as a dict of {len(source.params)} tensors by name, got a {type(params).__name__}. "
            "Call fn(state, params, *inputs), for example with fn.params."
        )
    found: dict[str, torch.Tensor] = {}
    for name, tensor in params.items():
        canonical = source.aliases.get(name, name)
        if canonical not in source.params:
            raise SpecError(
                f"Expected params of {fn.name} by name, got the unknown {name!r}. Known: {', '.join(source.params)}."
            )
        if not _same_tensor(found.setdefault(canonical, tensor), tensor):
            raise SpecError(
                f"Expected one tensor for {canonical!r} and {name!r}, which are tied, got two. Pass it once."
            )
    missing = [name for name in source.params if name not in found]
    if missing:
        raise SpecError(f"Expected params of {fn.name} to have {', '.join(map(repr, missing))}, got none. Add it.")
    return [found[name] for name in source.params]


def _same_tensor(left: Any, right: Any) -> bool:
    if left is right or not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return left is right
    if left is right or is_wrapped(left) or is_wrapped(right):
        return left is right
    return left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()


def check_held(source: Source, held: list[torch.Tensor]) -> None:
    """Raises `SpecError` if a parameter or buffer is not a tensor like the module's own."""
    named = [*source.params.items(), *source.buffers.items()]
    for (name, ours), given in zip(named, held, strict=True):
        if not isinstance(given, torch.Tensor):
            raise SpecError(
                f"Expected a tensor for {name!r}, got {type(given).__name__}. Pass the tensor itself; parameters and "
                "states of JAX go through interop.jax_to_torch, or the function through interop.to_jax."
            )
        expected, got = replace(spec_of(ours, name), stride=()), replace(spec_of(given, name), stride=())
        if str(expected) != str(got):
            raise SpecError(
                f"Expected {name!r} of {source.name} to be {expected}, got {got}. "
                "Convert it, or compile the model with one of that kind."
            )


def _shown(captured: Captured) -> str:
    return describe_inputs(captured.source, captured.in_structure, captured.specs[captured.num_held :])


def _texts(source: Source, structure: Structure, inputs: list[torch.Tensor]) -> str:
    return describe_inputs(source, structure, [spec_of(t, "an input") for t in inputs])
