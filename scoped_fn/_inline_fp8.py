"""A compiled function in FP8 inside a function that is being traced: its graph becomes part of that trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from scoped_fn._errors import SpecError
from scoped_fn._fp8_plan import scope_key
from scoped_fn._fp8_results import current_fp8, with_results
from scoped_fn._replay import transformable
from scoped_fn._structure import unflatten
from scoped_fn.stages.captured import Captured
from scoped_fn.state import CompilerState, active_scope

if TYPE_CHECKING:
    from scoped_fn._compiled import CompiledFn


@dataclass(frozen=True, eq=False)
class Inline:
    """A captured graph in FP8 that another trace can run through.

    Attributes:
        captured: The graph.
        gm: It, without checkpoint regions and ready for every transform.
        shapes: Of the inputs.
        scope: The `ScopeKey` that it is for.
        records: Whether it gives amaxes.
    """

    captured: Captured
    gm: torch.fx.GraphModule
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]
    scope: Any
    records: bool


def inline_of(captured: Captured) -> Inline:
    """Returns what a trace needs of a captured graph in FP8."""
    scope = captured.in_structure.scope
    inputs = captured.specs[captured.num_held : len(captured.specs) - scope.extras]
    shapes = tuple((spec.shape, spec.dtype) for spec in inputs)
    return Inline(captured, transformable(captured.graph.gm), shapes, scope, "fp8.amax" in captured.new_buffers)


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
    scope, fp8 = active_scope(state), current_fp8(state, fn.owner)
    key = scope_key(scope, fp8.columns if fp8 is not None else ())  # type: ignore[arg-type]
    leaves = pytree.tree_leaves((args, {name: kwargs[name] for name in sorted(kwargs)}))
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    shapes = tuple((x.shape, x.dtype) for x in inputs)
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in [*held, *inputs])
    found = [inline for inline in fn._memo.inlines if inline.scope == key and inline.shapes == shapes]
    if not found:
        raise SpecError(
            f"Expected {fn.name} to have been compiled under this autocast scope for inputs of these shapes before "
            "another function that is traced calls it, got a new kind of call. Call it once outside."
        )
    chosen = next((inline for inline in found if inline.records == wants), found[0])
    captured = chosen.captured
    extras = [] if fp8 is None else [fp8.scale, fp8.grad_sink]
    results = chosen.gm(*held, *captured.constants, *inputs, *extras)
    outs = list(results[: captured.num_outputs])
    out = outs[0] if captured.out_structure.leaves == (None,) else unflatten(captured.out_structure, outs)
    names = captured.new_buffers if wants or not chosen.records else ()
    request = captured.fp8.request
    return with_results(state, fn.owner, names, results[captured.num_outputs :], request), out
