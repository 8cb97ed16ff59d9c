"""One call of a compiled function: what it was given, as flat tensors and a structure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from scoped_fn._fp8.plan import AMAX, SINK, ScopeKey
from scoped_fn._fp8.quantized_params import QuantizedParams
from scoped_fn._fp8.results import with_columns, with_results
from scoped_fn._fp8.support import check_support
from scoped_fn._runtime import Memo, Variant
from scoped_fn._structure import Structure
from scoped_fn.stages.autocast import Sites, find_sites, rewrite
from scoped_fn.stages.captured import Captured, with_facts
from scoped_fn.state import CompilerState, active_scope
from scoped_fn.state.fp8_state import selected


@dataclass(eq=False, slots=True)
class Call:
    """What one call works on.

    Attributes:
        owner: The function's token.
        given: The state it was given.
        state: The same, with the FP8 columns that code for the call takes.
        tensors: Parameters, buffers, inputs; in FP8 also scales and sinks, and quantized weights.
        structure: Of the inputs, with the autocast scope.
    """

    owner: int
    given: CompilerState
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

    def fit(self, memo: Memo, captured: Captured) -> Sites | None:
        """Returns the sites of this call if a scope is on; gives the call the columns of scales that it lacks.

        Args:
            memo: Where they are remembered.
            captured: The graph of this call.
        """
        scope = active_scope(self.state)
        if scope is None:
            return None
        sites, key = find_sites(captured, scope), self.structure.scope
        plan = sites.plan
        if not set(plan.columns) <= set(key.columns):
            plain = replace(self.structure, scope=None)
            kind = memo.learn(plain, key._replace(columns=()), plan.columns, plan.request)
            self.state = with_columns(self.state, self.owner, kind.columns, plan.request, sites.device)
            inputs = len(self.tensors) - key.extras
            codes = self.tensors[inputs + (2 if key.columns else 0) :]
            scales = selected(self.state.fp8[self.owner], kind.columns)
            self.tensors, self.structure = [*self.tensors[:inputs], *scales, *codes], kind.structure
        return sites

    def in_fp8(self, captured: Captured, sites: Sites | None, *, record: bool) -> Captured:
        """Returns the graph of this call in FP8 if a scope is on.

        Args:
            captured: The graph of this call.
            sites: Its sites, from `fit`.
            record: Whether amaxes are wanted.
        """
        if sites is None:
            return captured
        key: ScopeKey = self.structure.scope
        extras = self.tensors[len(self.tensors) - key.extras :]
        captured = with_facts(captured, check_support(self.state, sites.device))
        return rewrite(captured, sites, key, extras, record=record or key.scope.calibrating)

    def next_state(self, variant: Variant, results: Any) -> CompilerState:
        """Returns the state with the buffers and amaxes that came back; the one that was given if there are none."""
        names = variant.new_buffers
        if not names:
            return self.given
        results = results[variant.num_outputs : variant.num_outputs + len(names)]
        records = AMAX in names or SINK in names
        columns = self.structure.scope.columns if records else ()
        return with_results(self.state if records else self.given, self.owner, columns, names, results)


def in_scope(memo: Memo, call: Call, params: Any) -> None:
    """Gives a call what its innermost scope adds: the scope in the structure, and tensors that follow the inputs."""
    scope = active_scope(call.state)
    if scope is None:
        return
    quantized = isinstance(params, QuantizedParams) and not scope.calibrating
    key = memo.scope_key(scope, params.key if quantized else ())
    kind = memo.fp8_kind(call.structure, key)
    call.structure = kind.structure
    if kind.columns:
        call.state = with_columns(call.state, call.owner, kind.columns, kind.request, _device(call.tensors))
        call.tensors += selected(call.state.fp8[call.owner], kind.columns)
    if quantized:
        call.tensors += params.tensors


def _device(tensors: list[torch.Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in tensors if tensor.is_floating_point()), None)
