"""`value_and_grad` of a compiled function: forward and backward as one compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from scoped_fn._backends import GraphRole
from scoped_fn._call import Call
from scoped_fn._compiled import CompiledFn
from scoped_fn._errors import SpecError
from scoped_fn._fp8.scales import updated
from scoped_fn._one_graph import one_graph, only_value_differs
from scoped_fn._runtime import Variant
from scoped_fn._specialize import recapture
from scoped_fn._structure import Structure, flatten, unflatten
from scoped_fn._variants import Finish, finish_outputs, keep_for_traces, whole_variant
from scoped_fn.stages.apply import apply
from scoped_fn.stages.compile_graph import compile_graph
from scoped_fn.stages.lower import lower_joint
from scoped_fn.state import CompilerState, overrides_of
from scoped_fn.state.fp8_state import stage_gradients


@dataclass(frozen=True)
class WholeStep:
    """The stateful function `(state, *args) -> (state, (value, gradients))` of a compiled one.

    Attributes:
        fn: The compiled function; its memo keeps the code.
        argnums: Which arguments to differentiate.
        has_aux: Whether the function returns (value, aux).
        generic: The same for tensors that another transform acts on, and where it is traced.
        accumulate: Whether FP8 scales are left as they are until `update_scales`.
    """

    fn: CompiledFn
    argnums: int | tuple[int, ...]
    has_aux: bool
    generic: Callable[..., tuple[CompilerState, Any]]
    accumulate: bool = False

    def __call__(self, state: CompilerState, *args: Any, **kwargs: Any) -> tuple[CompilerState, Any]:
        """Returns the next state, and the value with the gradients."""
        fn = self.fn
        if torch.compiler.is_dynamo_compiling():
            return self.generic(state, *args, **kwargs)
        call = fn.bind(state, args, kwargs)
        if fn.is_transformed(call):
            return self.generic(state, *args, **kwargs)
        kind = ("value_and_grad", self.argnums, self.has_aux)
        variant = fn._memo.find_or_make(kind, call, lambda: self._make(kind, args, call))
        with torch.no_grad():
            results = variant.launch(call.tensors)
            (value, grads), of_sinks = variant.finish(results, call.tensors)
            after = call.next_state(variant, results)
            if call.scope is not None and call.scope.columns:
                after = self._next_scales(after, of_sinks, call.scope.columns)
            return after, (value, self._named_as_given(args, grads))

    def _next_scales(self, state: CompilerState, of_sinks: torch.Tensor, columns: Any) -> CompilerState:
        held = stage_gradients(state.fp8[self.fn.owner], of_sinks, columns)
        held = held if self.accumulate else updated(held)
        return replace(state, fp8=state.fp8.set(self.fn.owner, held))

    def _make(self, kind: Any, args: tuple[Any, ...], call: Call) -> Variant:
        fn = self.fn
        groups = [argument_group(fn, args, i) for i in self._places]
        wanted = [False] * len(call.tensors)
        for group in groups:
            for i in group.wanted:
                wanted[i] = True
        with torch.inference_mode(False), torch.enable_grad():
            captured, plan = recapture(fn.origin, call, wanted)
            captured = only_value_differs(captured, self.has_aux)
            before, sites = call.structure, call.fit(fn._memo, captured)
            known = fn._memo.find(kind, call)
            if call.structure is not before and known is not None:
                return known
            captured = call.in_fp8(captured, sites, record=True)
            wanted += [False] * (len(call.tensors) - len(wanted))
            sink = call.sink
            if sink is not None:
                wanted[sink] = True
            flags = captured.with_constants(wanted, [False] * len(captured.constants))
            joint = lower_joint(plan.settings, captured, tuple(flags), plan.backend)
            _, joint = apply(plan.settings, joint, plan.passes.joint)
            joint, whole = one_graph(joint, plan)
            captured, graph = joint.captured, joint.graph
            role = GraphRole(
                len(graph.outputs), torch_rng=captured.rng == "torch", whole=whole, lowered_for=plan.backend
            )
            compiled = compile_graph(graph, plan.backend, role, overrides=overrides_of(call.state, fn.owner))
        fn._memo.compiled_graphs += 1
        start, count = captured.num_held - len(captured.constants), len(captured.constants)
        at = {i if i < start else i - count: joint.num_forward + n for n, i in enumerate(joint.grads)}
        finish = self._finish(finish_outputs(captured), groups, at, sink)
        keep_for_traces(captured, fn._memo, exact=False)
        return whole_variant(kind, captured, compiled, joint.new_buffers, fn._memo, finish)

    def _named_as_given(self, args: tuple[Any, ...], grads: Any) -> Any:
        """Returns gradients of tied parameters under the names that the caller used."""
        aliases = self.fn.captured.source.aliases
        if not aliases or 0 not in self._places or not any(name in aliases for name in args[0]):
            return grads
        every = [grads] if isinstance(self.argnums, int) else list(grads)
        at = self._places.index(0)
        every[at] = {name: every[at][aliases.get(name, name)] for name in args[0]}
        return every[0] if isinstance(self.argnums, int) else tuple(every)

    @property
    def _places(self) -> tuple[int, ...]:
        return (self.argnums,) if isinstance(self.argnums, int) else self.argnums

    def _finish(self, value_of: Finish, groups: list[Group], at: dict[int, int], sink: int | None) -> Finish:
        single = isinstance(self.argnums, int)

        def finish(results: Sequence[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
            grads = [group.build(results, tensors, at) for group in groups]
            of_sinks = None if sink is None else results[at[sink]] if sink in at else torch.zeros_like(tensors[sink])
            return (value_of(results, tensors), grads[0] if single else tuple(grads)), of_sinks

        return finish


@dataclass(frozen=True, eq=False)
class Group:
    """The tensors of one differentiated argument.

    Attributes:
        indices: Where they are among parameters, buffers and inputs.
        wanted: Those of them that get a gradient; the others get zeros.
        names: Parameter names, if the argument is the parameters.
        structure: Structure of any other argument.
    """

    indices: range
    wanted: tuple[int, ...]
    names: tuple[str, ...] | None
    structure: Structure | None

    def build(self, results: Sequence[torch.Tensor], tensors: list[torch.Tensor], at: dict[int, int]) -> Any:
        """Returns the gradients in the structure of the argument."""
        grads = [results[at[i]] if i in at else torch.zeros_like(tensors[i]) for i in self.indices]
        if self.names is not None:
            return dict(zip(self.names, grads, strict=True))
        return unflatten(self.structure, grads)  # type: ignore[arg-type]


def argument_group(fn: CompiledFn, args: tuple[Any, ...], place: int) -> Group:
    """Returns where the tensors of one argument are.

    Raises:
        SpecError: There is no such argument, or one of its tensors is not differentiable.
    """
    source = fn.captured.source
    if not isinstance(place, int) or not 0 <= place < len(args):
        raise SpecError(f"Expected argnums from 0 to {len(args) - 1}, got {place!r}. Count arguments after the state.")
    if source.is_module and place == 0:
        trainable = tuple(i for i, p in enumerate(source.params.values()) if p.requires_grad)
        return Group(range(len(source.params)), trainable, tuple(source.params), None)
    first = 1 if source.is_module else 0
    start = len(source.params) + len(source.buffers) + len(flatten(args[first:place], "inputs")[0])
    tensors, structure = flatten(args[place], "inputs")
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise SpecError(
                f"Expected argument {place} to have floating point tensors to differentiate, got {tensor.dtype}. "
                "Choose others with argnums."
            )
    indices = range(start, start + len(tensors))
    return Group(indices, tuple(indices), None, structure)
