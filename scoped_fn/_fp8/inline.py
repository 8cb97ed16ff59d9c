"""A compiled function in FP8, or one that draws, inside a function that is traced: its graph becomes part of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from scoped_fn._errors import SpecError
from scoped_fn._fp8.plan import AMAX, scope_key
from scoped_fn._fp8.results import with_columns, with_results
from scoped_fn._replay import transformable
from scoped_fn._structure import Structure, unflatten
from scoped_fn._torch.tracing import any_transform_active
from scoped_fn.stages.captured import Captured
from scoped_fn.state import CompilerState, FrozenDict, active_scope
from scoped_fn.state.fp8_state import selected

if TYPE_CHECKING:
    from scoped_fn._compiled import CompiledFn


class Inline:
    """A captured graph that is in FP8 or takes a key, for traces to run through.

    Attributes:
        captured: The graph.
        gm: It, without checkpoint regions and ready for every transform; None if it does not compute what a call does.
        inputs: Shape, dtype and device of the inputs.
        key: The `ScopeKey` that it is for, without columns; None outside autocast.
        columns: The columns of scales that it takes.
        records: Whether it gives amaxes.
    """

    def __init__(self, captured: Captured, *, exact: bool) -> None:
        structure = captured.in_structure
        scope = structure.scope
        inputs = captured.specs[captured.num_held :][: structure.num_tensors]
        self.captured = captured
        self.gm = transformable(captured.graph.gm) if exact and not (scope and scope.weights) else None
        self.inputs = tuple((spec.shape, spec.dtype, spec.device) for spec in inputs)
        self.key = scope._replace(columns=(), weights=()) if scope else None
        self.columns = scope.columns if scope else ()
        self.records = AMAX in captured.new_buffers
        self.spec, self.others = _plain_leaves(captured.in_structure)

    def fits(self, leaves: Sequence[Any], spec: Any) -> bool:
        """Returns whether it is for inputs like these; by plain comparisons, which Dynamo can read."""
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return tuple((x.shape, x.dtype, x.device) for x in inputs) == self.inputs and self.is_alike(leaves, spec)

    def is_alike(self, leaves: Sequence[Any], spec: Any) -> bool:
        """Returns whether it is for inputs of this structure."""
        if self.others is None or len(leaves) != len(self.others) or spec != self.spec:
            return False
        return all(
            (other is None) == isinstance(leaf, torch.Tensor)
            and (other is None or (type(leaf) is type(other[0]) and leaf == other[0]))
            for leaf, other in zip(leaves, self.others, strict=True)
        )


def _plain_leaves(structure: Structure) -> tuple[Any, tuple[Any, ...] | None]:
    """Returns the containers of the inputs, and for each leaf None for a tensor, else (value,).

    There is None in place of the leaves where there are dataclasses among them.
    """
    if any(isinstance(leaf, tuple) for leaf in structure.leaves):
        return structure.spec, None
    return structure.spec, tuple(None if leaf is None else (leaf.value,) for leaf in structure.leaves)


def inlined_graph(
    fn: CompiledFn, state: CompilerState, params: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CompilerState, Any] | None:
    """Returns what a call returns, by running its graph; Dynamo reads this code too.

    None if such calls are not in FP8 and do not draw.

    Args:
        fn: The function.
        state: The state.
        params: Parameters.
        args: The inputs.
        kwargs: Those by name.

    Raises:
        SpecError: The function was not compiled for such a call before; in here it cannot be.
    """
    scope = active_scope(state)
    key = scope_key(scope, ()) if scope else None
    leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in sorted(kwargs)}))
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    found = [
        inline
        for inline in fn._memo.inlines
        if inline.gm is not None and inline.key == key and inline.fits(leaves, spec)
    ]
    alike = [inline.captured.keyed for inline in fn._memo.inlines if inline.is_alike(leaves, spec)]
    if not found and scope is None and alike and not any(alike):
        return None
    if not found:
        raise SpecError(
            f"Expected {fn.name} to have been compiled{' under this autocast scope' if scope else ''} for inputs like "
            "these before another function that is traced calls it, got a new kind of call. Call it once outside."
        )
    follows = any(t.requires_grad for t in [*params, *inputs]) or any_transform_active()
    wants = key is not None and (key.scope.calibrating or (torch.is_grad_enabled() and follows))
    chosen = next((inline for inline in found if inline.records == wants), found[0])
    captured, columns = chosen.captured, chosen.columns
    ready = with_columns(state, fn.owner, columns, captured.fp8.request) if columns else state
    extras = selected(ready.fp8[fn.owner], columns) if columns else []
    if captured.keyed:
        extras = [state.key.view(torch.int32), *extras]
    own = {name: state.buffers[fn.owner][name].clone() for name in captured.source.buffers}  # it may change them
    results = chosen.gm(*params, *own.values(), *captured.constants, *inputs, *extras)
    outs, new = list(results[: captured.num_outputs]), results[captured.num_outputs :]
    out = outs[0] if captured.out_structure.leaves == (None,) else unflatten(captured.out_structure, outs)
    records = wants and chosen.records
    after = with_results(ready if records else state, fn.owner, columns, captured.new_buffers, new, records=records)
    if own:
        assigned = {name: after.buffers[fn.owner][name] for name in own if name in captured.new_buffers}
        after = replace(after, buffers=after.buffers.set(fn.owner, FrozenDict({**own, **assigned})))
    return after, out
