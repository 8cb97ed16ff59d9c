"""One call of a compiled function: what it was given, as flat tensors and a structure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from scoped_fn._fp8_plan import ScopeKey, Weights, scope_key
from scoped_fn._fp8_results import current_fp8, with_results
from scoped_fn._quantized_params import QuantizedParams
from scoped_fn._runtime import Memo, Variant
from scoped_fn._structure import Structure
from scoped_fn.stages.autocast import Sites, find_sites, rewrite, with_columns
from scoped_fn.stages.captured import Captured
from scoped_fn.state import AutocastScope, CompilerState, active_scope


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
        results = results[variant.num_outputs : variant.num_outputs + len(variant.new_buffers)]
        return with_results(self.state, self.owner, variant.new_buffers, results, variant.request)


def fp8_inputs(
    memo: Memo, state: CompilerState, owner: int, structure: Structure, params: Any
) -> tuple[Structure, list[torch.Tensor]]:
    """Returns the structure of a call with the autocast scope, and the tensors that follow its inputs."""
    scope = active_scope(state)
    if scope is None:
        return structure, []
    held = current_fp8(state, owner)
    columns, extras = (held.columns, [held.scale, held.grad_sink]) if held and held.columns else ((), [])
    weights: Weights = ()
    if isinstance(params, QuantizedParams) and not scope.calibrating:
        weights, extras = params.key, [*extras, *params.tensors]
    return memo.scoped(structure, scope, (columns, weights), lambda: scope_key(scope, columns, weights)), extras
