"""A compiled function inside a function that is being traced: it becomes part of that trace, as its own model would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from scoped_fn._errors import SpecError
from scoped_fn._fp8.inline import inlined_graph
from scoped_fn.state import CompilerState, FrozenDict, OwnershipError, active_scope

if TYPE_CHECKING:
    from scoped_fn._compiled import CompiledFn

TENSOR, OBJECT = "\0tensor", "\0object"


def _marked(value: Any) -> Any:
    """Returns arguments as plain data, with `TENSOR` in place of tensors; Dynamo reads this code too."""
    if isinstance(value, torch.Tensor):
        return TENSOR
    if is_dataclass(value):
        return OBJECT, type(value), {field.name: _marked(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return OBJECT, type(value), {name: _marked(getattr(value, name)) for name in value._fields}
    if isinstance(value, tuple):
        return tuple(_marked(part) for part in value)
    if isinstance(value, list):
        return [_marked(part) for part in value]
    if isinstance(value, dict):
        return {name: _marked(part) for name, part in value.items()}
    return value


def inlined(
    fn: CompiledFn, state: CompilerState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CompilerState, Any]:
    """Returns what a call returns, by running the model itself: whoever traces sees its operations.

    Dynamo reads this code too.

    Raises:
        SpecError: The function was compiled with passes on the captured graph, which would be lost.
    """
    source = fn.captured.source
    if fn.has_captured_passes:
        raise SpecError(
            f"Expected {source.name} to be compiled without captured passes where another function that is traced "
            "calls it, got some. Give the passes to the outer compile."
        )
    if fn.owner not in state.owners:
        raise OwnershipError(
            f"Expected a state that holds {source.name}, owner {fn.owner}, got owners {list(state.owners)}. "
            "Pass the state that compile returned, or a later one."
        )
    by_graph = active_scope(state) is not None or len(fn._memo.keyed) > 0
    if not by_graph and fn.captured.rng == "key":
        inputs = args[1:] if source.is_module else args
        if fn.draws_in_own_code(_marked(inputs), _marked(kwargs)):
            raise SpecError(
                f"Expected {source.name} to have been compiled for inputs like these before another function that is "
                "traced calls it, got a new kind of call, which may draw random numbers. Call it once outside."
            )
    if not source.is_module:
        found = inlined_graph(fn, state, [], args, kwargs) if by_graph else None
        return (state, source.call(*args, **kwargs)) if found is None else found
    params: Mapping[str, torch.Tensor] = args[0]
    held = {source.aliases.get(name, name): tensor for name, tensor in params.items()}
    wrong = [name for name in {**source.params, **held} if name not in source.params or name not in held]
    if wrong:
        raise SpecError(
            f"Expected params of {source.name} named {', '.join(source.params)}, got {wrong[0]!r} missing or unknown. "
            "Pass fn.params, or your own dict with the same names."
        )
    if by_graph:
        found = inlined_graph(fn, state, [held[name] for name in source.params], args[1:], kwargs)
        if found is not None:
            return found
    for name in source.buffers:
        held[name] = state.buffers[fn.owner][name].clone()
    out = torch.func.functional_call(source.call, held, args[1:], kwargs)  # type: ignore[arg-type]
    if not source.buffers:
        return state, out
    new = FrozenDict({name: held[name] for name in source.buffers})
    return replace(state, buffers=state.buffers.set(fn.owner, new)), out
