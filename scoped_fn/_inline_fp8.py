"""A compiled function in FP8 inside a function that is being traced: its graph becomes part of that trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from scoped_fn._errors import SpecError
from scoped_fn._fp8_plan import AMAX, scope_key
from scoped_fn._fp8_results import with_columns, with_results
from scoped_fn._replay import transformable
from scoped_fn._structure import flatten, unflatten
from scoped_fn.stages.captured import Captured
from scoped_fn.state import CompilerState, active_scope
from scoped_fn.state.fp8_state import selected

if TYPE_CHECKING:
    from scoped_fn._compiled import CompiledFn


class Inline:
    """A captured graph in FP8, for traces to run through.

    Attributes:
        captured: The graph.
        gm: It, without checkpoint regions and ready for every transform; None if it does not compute what a call does.
        inputs: Shape, dtype and device of the inputs.
        key: The `ScopeKey` that it is for, without columns.
        columns: The columns of scales that it takes.
        records: Whether it gives amaxes.
    """

    def __init__(self, captured: Captured, *, exact: bool) -> None:
        scope = captured.in_structure.scope
        inputs = captured.specs[captured.num_held : len(captured.specs) - scope.extras]
        self.captured = captured
        self.gm = transformable(captured.graph.gm) if exact and not scope.weights else None
        self.inputs = tuple((spec.shape, spec.dtype, spec.device) for spec in inputs)
        self.key, self.columns = scope._replace(columns=(), weights=()), scope.columns
        self.records = AMAX in captured.new_buffers


def inlined_fp8(
    fn: CompiledFn, state: CompilerState, held: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CompilerState, Any]:
    """Returns what a call returns, by running its graph; Dynamo reads this code too.

    Args:
        fn: The function.
        state: Its innermost scope is on.
        held: Parameters and buffers.
        args: The inputs.
        kwargs: Those by name.

    Raises:
        SpecError: The function was not compiled for such a call before; in here it cannot be.
    """
    key = scope_key(active_scope(state), ())  # type: ignore[arg-type]
    inputs, structure = flatten((args, {name: kwargs[name] for name in sorted(kwargs)}), "inputs")
    specs = tuple((x.shape, x.dtype, x.device) for x in inputs)
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in [*held, *inputs])
    found = [
        inline
        for inline in fn._memo.inlines
        if inline.gm is not None
        and inline.key == key
        and inline.inputs == specs
        and inline.captured.in_structure.leaves == structure.leaves
        and inline.captured.in_structure.spec == structure.spec
    ]
    if not found:
        raise SpecError(
            f"Expected {fn.name} to have been compiled under this autocast scope for inputs like these before another "
            "function that is traced calls it, got a new kind of call. Call it once outside."
        )
    chosen = next((inline for inline in found if inline.records == wants), found[0])
    captured, columns = chosen.captured, chosen.columns
    ready = with_columns(state, fn.owner, columns, captured.fp8.request)
    extras = selected(ready.fp8[fn.owner], columns) if columns else []
    results = chosen.gm(*held, *captured.constants, *inputs, *extras)
    outs = list(results[: captured.num_outputs])
    out = outs[0] if captured.out_structure.leaves == (None,) else unflatten(captured.out_structure, outs)
    if chosen.records and not wants:
        return state, out
    return with_results(ready, fn.owner, columns, captured.new_buffers, results[captured.num_outputs :]), out
