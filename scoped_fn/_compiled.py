"""`CompiledFn`: what `compile` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from scoped_fn import _specialize
from scoped_fn._call import Call, in_scope
from scoped_fn._errors import SpecError
from scoped_fn._graph import Graph
from scoped_fn._inline import inlined
from scoped_fn._own_code import own_code_draws
from scoped_fn._plan import Plan
from scoped_fn._runtime import CacheInfo, Memo, Variant
from scoped_fn._schedule import Schedule
from scoped_fn._specs import plain
from scoped_fn._state_check import check_state
from scoped_fn._structure import Structure, flatten
from scoped_fn._torch.dual import in_transform
from scoped_fn._torch.levels import at_level, in_vmap, transforms_active
from scoped_fn._torch.tensors import PLAIN_TYPES, is_fake
from scoped_fn._torch.tracing import jit_is_tracing, tracing_proxies
from scoped_fn._torch.wrapped import alive, is_dead, is_transformed, tracked_and_fake
from scoped_fn.passes.graph_pass import identity
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.lower import Inference
from scoped_fn.stages.partition import Split
from scoped_fn.state import CompilerState
from scoped_fn.state.owners import check_owner


@dataclass(frozen=True, eq=False, repr=False)
class CompiledFn:
    """A compiled pure function: `state, out = fn(state, params, *inputs)`.

    For a plain function there are no `params`: `state, out = fn(state, *args)`. The result depends on the arguments
    and the state alone; parameters are an argument, changed buffers come back in the state, outputs share no memory
    with arguments or with each other. Outputs carry gradients for plain autograd when grad mode is on.

    Attributes:
        owner: Its token in the state.
        captured: The graph of the first call.
        pristine: The same before any pass or autocast, as the model is: what `recompile` starts from.
    """

    owner: int
    captured: Captured
    pristine: Captured
    _plan: Plan | None
    _memo: Memo
    _split: Split | None = None
    _inference: Inference | None = None

    @property
    def name(self) -> str:
        """The name of the class or function that was compiled."""
        return self.captured.source.name

    @property
    def params(self) -> dict[str, torch.nn.Parameter]:
        """The module's parameters by name; a tied one appears once, by its first name. Empty for a function."""
        return dict(self.captured.source.params)

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters -> the name in `params`. Calls accept either."""
        return dict(self.captured.source.aliases)

    @property
    def training(self) -> bool | None:
        """The module's mode when it was compiled, which all calls keep; None for a function."""
        return self.captured.source.training

    @property
    def sites(self) -> tuple[str, ...]:
        """The matmuls that run in FP8 in calls like the first, in the scope that was open at compile, by name."""
        return tuple(self.captured.fp8.rules) if self.captured.fp8 else ()

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of the state that the code of the first call was made for; `ABSENT` for what was not there."""
        return dict(self.captured.facts)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of its passes, if it has one."""
        return self._plan.schedule if self._plan else None

    @property
    def entry(self) -> int | None:
        """Which entry of the schedule is in force; None if none is."""
        return self._plan.entry if self._plan else None

    @property
    def joint_graph(self) -> Graph | None:
        """Forward and backward in one graph; None if the first call needed no gradient."""
        return self._split.joint.graph if self._split else None

    @property
    def forward_graph(self) -> Graph:
        """The forward graph of the first call."""
        return self._split.forward if self._split else self._inference.graph  # type: ignore[union-attr]

    @property
    def backward_graph(self) -> Graph | None:
        """The backward graph of the first call; None if it needed no gradient."""
        return self._split.backward if self._split else None

    @property
    def has_captured_passes(self) -> bool:
        """Whether passes changed the captured graph, or may have: it was assembled by hand."""
        return self._plan is None or self._plan.passes.captured is not identity

    def cache_info(self) -> CacheInfo:
        """Returns how often this function was captured, compiled and called."""
        return self._memo.info()

    def __repr__(self) -> str:
        source, mode = self.captured.source, {True: ", training", False: ", evaluation", None: ""}
        elements = sum(p.numel() for p in source.params.values())
        params = f", {len(source.params)} parameters ({elements:,} elements)" if source.is_module else ""
        backend = f", backend={self._plan.backend!r}" if self._plan else ""
        kinds = ", ".join(str(v.kind) for v in self._memo.variants)
        return f"CompiledFn({self.name}, owner {self.owner}{mode[self.training]}{params}{backend}, variants: {kinds})"

    def __call__(self, state: CompilerState, *args: Any, **kwargs: Any) -> tuple[CompilerState, Any]:
        """Returns the next state and the result.

        Args:
            state: A state that holds `owner`.
            args: For a module: a dict of parameters, then the inputs. For a function: its arguments.
            kwargs: Keyword arguments, as the model takes them.

        Raises:
            SpecError: The state, parameters or inputs are not what they should be.
            OwnershipError: The state does not hold this function.
        """
        if torch.compiler.is_dynamo_compiling() or jit_is_tracing():  # type: ignore[no-untyped-call]
            return inlined(self, state, args, kwargs)
        call = self.bind(state, args, kwargs)
        tensors = call.tensors
        if any(map(is_fake, tensors)):
            return inlined(self, state, args, kwargs)
        if self.is_transformed(call):
            tensors = call.tensors
            tracked, fake = tracked_and_fake(tensors)
            if fake:
                return inlined(self, state, args, kwargs)
            return self._run(_specialize.transforming_variant(self.origin, call, tracked), call)
        if not transforms_active():
            return self._run(self._plain_variant(call), call)
        call.below_vmap = in_vmap()
        with at_level(None):
            return self._run(self._plain_variant(call), call)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def draws_in_own_code(self, args: Any, kwargs: Any) -> bool:
        """Returns whether the model's own code may draw in a call of this kind; Dynamo asks it while it traces."""
        return own_code_draws(self.captured.source, self._memo.inlines, args, kwargs)

    def is_transformed(self, call: Call) -> bool:
        """Returns whether a transform acts on a call, or may, or records it."""
        if not in_transform():
            return tracing_proxies() is not None
        if is_transformed(call.tensors):
            return True
        # In vmap a function that draws is transformed in any case; so is one of which nobody knows yet.
        return in_vmap() and (self.captured.rng == "torch" or not self._memo.knows(call.structure))

    def _plain_variant(self, call: Call) -> Variant:
        kind = "training" if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors) else "inference"
        if self._plan is None:
            kind = self._memo.variants[0].kind
        return _specialize.plain_variant(self.origin, kind, call)

    def _run(self, variant: Variant, call: Call) -> tuple[CompilerState, Any]:
        results = variant.launch(call.tensors)
        return call.next_state(variant, results), variant.finish(results, call.tensors)

    @property
    def origin(self) -> _specialize.Origin:
        """Where new variants come from."""
        return _specialize.Origin(self.captured, self._plan, self._memo)

    def bind(self, state: CompilerState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Returns parameters, buffers and inputs as one list, and the structure of the inputs."""
        check_state(state)
        source = self.captured.source
        held: list[torch.Tensor] = []
        params = args[0] if args else None
        if source.is_module:
            if not args:
                raise SpecError("Expected fn(state, params, *inputs), got no params. Pass fn.params, or your own dict.")
            held = ordered_params(self, args[0])
            args = args[1:]
        owner = state.owners.get(self.owner)
        if owner is None or owner.name != source.name:
            check_owner(state, self.owner, source.name)
        if source.buffers:
            held += _specialize.buffers_of(self, state)
        inputs, structure = self._inputs(args, kwargs)
        tensors = [*held, *inputs]
        try:
            if any(t.is_neg() or t.is_conj() or is_dead(t) for t in tensors):
                tensors = [plain(t) if t.is_neg() or t.is_conj() else alive(t) for t in tensors]
        except AttributeError:
            _specialize.check_held(source, held)
            raise
        call = Call(self.owner, state, state, tensors, structure)
        if self._memo.keyed and self._memo.keyed_structure(structure) is not None:
            call.take_key(self._memo)
        if state.autocast:
            in_scope(self._memo, call, params)
        return call

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Structure]:
        if kwargs or not all(type(arg) in PLAIN_TYPES for arg in args):
            return flatten((args, dict(sorted(kwargs.items()))), "inputs")
        structures = self._memo.structures
        if len(args) not in structures:
            made, first = flatten((args, {}), "inputs")[1], self.captured.in_structure
            structures[len(args)] = first if made == first else made  # the same object compares fastest
        return list(args), structures[len(args)]


def ordered_params(fn: CompiledFn, params: Any) -> list[torch.Tensor]:
    """Returns the parameters in order.

    Raises:
        SpecError: One is missing, unknown, or has another shape, dtype or device than the module's.
    """
    names = fn.captured.source.params
    if isinstance(params, Mapping) and len(params) == len(names):
        try:
            return [params[name] for name in names]
        except KeyError:
            pass
    return _specialize.resolve_params(fn, params)


@contextmanager
def normal_mode(grad: bool) -> Iterator[None]:
    """Leaves inference mode, if it is on, with grad mode as given."""
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield
