"""One call of a compiled function: what it was given, as flat tensors and a structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from scoped_fn._fp8_plan import AMAX, SINK, ScopeKey, scope_key
from scoped_fn._runtime import Memo, Variant
from scoped_fn._structure import Structure
from scoped_fn.stages.autocast import Sites, find_sites, rewrite, with_columns
from scoped_fn.stages.captured import Captured
from scoped_fn.state import AutocastScope, CompilerState, Fp8State, FrozenDict, active_scope
from scoped_fn.state.fp8_state import follow_recipe, stage_amax


@dataclass(eq=False, slots=True)
class Call:
    """What one call works on.

    Attributes:
        owner: The function's token.
        state: The state it was given; with more FP8 columns, if code for the call needs them.
        tensors: Parameters, buffers, inputs; in FP8 also scales and sinks, and quantized weights.
        structure: Of the inputs, with the autocast scope.
    """

    owner: int
    state: CompilerState
    tensors: list[torch.Tensor]
    structure: Structure

    @property
    def scope(self) -> ScopeKey | None:
        """The autocast scope, if one is on."""
        return self.structure.scope  # type: ignore[no-any-return]

    @property
    def sink(self) -> int | None:
        """Where the sinks are among the tensors, if there are any."""
        scope = self.scope
        return len(self.tensors) - scope.extras + 1 if scope is not None and scope.columns else None

    def in_fp8(self, captured: Captured, *, record: bool) -> Captured:
        """Returns the graph of this call in FP8 if a scope is on; gives the state the columns that it needs.

        Args:
            captured: The graph of this call.
            record: Whether amaxes are wanted.
        """
        scope = active_scope(self.state)
        if scope is None:
            return captured
        sites = find_sites(captured, scope)
        self._fit(scope, sites)
        extras = self.tensors[len(self.tensors) - self.structure.scope.extras :]
        return rewrite(captured, sites, self.structure.scope, extras, record=record or scope.calibrating)

    def _fit(self, scope: AutocastScope, sites: Sites) -> None:
        """Gives the state the columns that it lacks."""
        key: ScopeKey = self.structure.scope
        if set(sites.plan.columns) <= set(key.columns):
            return
        self.state = with_columns(self.state, self.owner, scope, sites)
        held = self.state.fp8[self.owner]
        inputs = len(self.tensors) - key.extras
        codes = self.tensors[inputs + (2 if key.columns else 0) :]
        self.tensors = [*self.tensors[:inputs], held.scale, held.grad_sink, *codes]
        self.structure = replace(self.structure, scope=key._replace(columns=held.columns))

    def next_state(self, variant: Variant, results: Any) -> CompilerState:
        """Returns the state with the buffers and amaxes that came back; the same state if there are none."""
        if not variant.new_buffers:
            return self.state
        start = variant.num_outputs
        new = dict(zip(variant.new_buffers, results[start : start + len(variant.new_buffers)], strict=True))
        state, amax, sink = self.state, new.pop(AMAX, None), new.pop(SINK, None)
        if new:
            buffers = FrozenDict({**state.buffers[self.owner], **new})
            state = replace(state, buffers=state.buffers.set(self.owner, buffers))
        if amax is None and sink is None:
            return state
        held = current_fp8(state, self.owner, variant.request)
        assert held is not None
        held = held if amax is None else stage_amax(held, amax)
        held = held if sink is None else replace(held, grad_sink=sink)
        return replace(state, fp8=state.fp8.set(self.owner, held))


def current_fp8(state: CompilerState, owner: int, request: Any = None) -> Fp8State | None:
    """Returns the scales of an owner, as the recipe of the scope on top has them."""
    held, scope = state.fp8.get(owner), active_scope(state)
    if held is None or scope is None:
        return held
    recipe = scope.recipe.delayed or request
    return held if recipe is None else follow_recipe(held, recipe)


def fp8_inputs(
    memo: Memo, state: CompilerState, owner: int, structure: Structure
) -> tuple[Structure, list[torch.Tensor]]:
    """Returns the structure of a call with the autocast scope, and the tensors that follow its inputs."""
    scope = active_scope(state)
    if scope is None:
        return structure, []
    held = current_fp8(state, owner)
    columns, extras = (held.columns, [held.scale, held.grad_sink]) if held and held.columns else ((), [])
    return memo.scoped(structure, scope, columns, lambda: scope_key(scope, columns)), extras
