"""One call of a compiled function: what it was given, as flat tensors and a structure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from scoped_fn._errors import RandomOpError, SpecError
from scoped_fn._fp8.plan import AMAX, SINK, ScopeKey
from scoped_fn._fp8.quantized_params import QuantizedParams
from scoped_fn._fp8.results import with_columns, with_results
from scoped_fn._fp8.support import check_support
from scoped_fn._random.graph import KEY
from scoped_fn._random.rows import rows_folded
from scoped_fn._random.words import keys_of
from scoped_fn._runtime import Memo, Variant
from scoped_fn._structure import Structure
from scoped_fn._torch.levels import at_level, transforms_active
from scoped_fn._torch.wrapped import highest_level
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
        shared_key: The key of the state as it is, where the call takes one made from it for each index of a vmap.
        below_vmap: Whether work goes on below a vmap level that does not act on the call, and cannot be seen.
    """

    owner: int
    given: CompilerState
    state: CompilerState
    tensors: list[torch.Tensor]
    structure: Structure
    shared_key: torch.Tensor | None = None
    below_vmap: bool = False

    @property
    def scope(self) -> ScopeKey | None:
        """The autocast scope, if one is on."""
        return self.structure.scope  # type: ignore[no-any-return]

    @property
    def sink(self) -> int | None:
        """Where the sinks are among the tensors, if there are any."""
        scope = self.scope
        return len(self.tensors) - scope.extras + 1 if scope is not None and scope.columns else None

    def take_key(self, memo: Memo) -> None:
        """Puts the state's key behind the inputs; from now on calls like this one take it."""
        if self.below_vmap:
            raise RandomOpError(
                "Expected a function that draws random numbers to be called once outside vmap before a call inside "
                "that nothing is mapped in, got a new kind of call. Call it once outside."
            )
        words = words_of_state(self.state)
        folded = rows_folded(words)
        self.shared_key = None if folded is words else words
        scope = self.structure.scope
        self.tensors.insert(len(self.tensors) - (scope.extras if scope else 0), folded)
        known = memo.keyed_structure(self.structure) or memo.learn_key(self.structure)
        self.structure = known if scope is None else replace(known, scope=scope)

    def fit(self, memo: Memo, captured: Captured) -> Sites | None:
        """Returns the sites of this call if a scope is on; gives the call the key and columns of scales that it lacks.

        Args:
            memo: Where they are remembered.
            captured: The graph of this call.
        """
        if captured.keyed and not self.structure.keyed:
            self.take_key(memo)
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
        """Returns the state with key, buffers and amaxes that came back; the one that was given if there are none."""
        names = variant.new_buffers
        if not names:
            return self.given
        results = results[variant.num_outputs : variant.num_outputs + len(names)]
        records = AMAX in names or SINK in names
        columns = self.structure.scope.columns if records else ()
        after = with_results(self.state if records else self.given, self.owner, columns, names, results)
        if self.shared_key is None or KEY not in names:
            return after
        return replace(after, key=keys_of(self.shared_key, 1)[0].view(torch.uint32))


def words_of_state(state: CompilerState) -> torch.Tensor:
    """Returns the words of a state's key, int32 (2,)."""
    key = state.key
    if not isinstance(key, torch.Tensor) or key.shape != (2,) or key.dtype != torch.uint32:
        got = f"{list(key.shape)} and {key.dtype}" if isinstance(key, torch.Tensor) else f"a {type(key).__name__}"
        raise SpecError(
            f"Expected the key of the state to have shape [2] and dtype uint32, got {got}. Make one with "
            "sf.random.key(seed), and map over states with sf.vmap(..., state_dim=0)."
        )
    if not transforms_active():
        return key.view(torch.int32)
    with at_level(highest_level([key])):  # a level of the caller's would wrap what levels below it take
        return key.view(torch.int32)


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
