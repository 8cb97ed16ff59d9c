"""The only place with effects: runs compiled code, remembers it, counts.

Nothing here outlives the compiled function that owns it, except through a pending backward, which keeps what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from scoped_fn._ambient import Ambient, ambient_settings
from scoped_fn._backends import Code
from scoped_fn._errors import StaleConstant
from scoped_fn._fp8.plan import scope_key
from scoped_fn._specs import TensorSpec, matches
from scoped_fn._structure import Structure
from scoped_fn._torch.dynamo import compile_lock
from scoped_fn._torch.tracing import disable_autocast, is_any_autocast_enabled
from scoped_fn.passes.graph_pass import ABSENT
from scoped_fn.state import FrozenDict
from scoped_fn.state.exact import Exact

if TYPE_CHECKING:
    from scoped_fn._root import Root
    from scoped_fn._training import TrainingCode

Launch = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class CacheInfo(NamedTuple):
    """What a compiled function did so far.

    Attributes:
        captures: How often the model was captured: once for each new kind of call.
        compiled_graphs: How many graphs were compiled.
        compiled_calls: How often compiled code was launched, forward or backward.
        eager_calls: How often something ran eager because it could not be compiled.
    """

    captures: int
    compiled_graphs: int
    compiled_calls: int
    eager_calls: int


@dataclass(frozen=True, eq=False)
class Variant:
    """Compiled code for one kind of call.

    Attributes:
        kind: "training", "inference", or what else asked for it.
        ambient: The torch settings it was captured under.
        structure: Structure of the arguments.
        specs: Specs of parameters, buffers and inputs.
        need_grad: Whether `requires_grad` of the arguments matters.
        launch: Runs the code.
        finish: (results, arguments) -> the structured value that the caller gets.
        num_outputs: How many results are the model's own outputs; the new buffers follow.
        new_buffers: Names of the buffers that come back.
        training: Its forward and backward code, if it has that.
        root: Makes what its higher derivatives and batched versions are derived from, if it has them.
        facts: Constants of the state that its code was made for, and what they were.
        every: All constants of the state, where it is not known yet which of them will be read.
    """

    kind: Any
    ambient: Ambient
    structure: Structure
    specs: tuple[TensorSpec, ...]
    need_grad: bool
    launch: Launch
    finish: Callable[[Sequence[torch.Tensor], list[torch.Tensor]], Any]
    num_outputs: int
    new_buffers: tuple[str, ...]
    training: TrainingCode | None = None
    root: Callable[[], Root] | None = None
    facts: Mapping[str, Any] = field(default_factory=FrozenDict)
    every: Mapping[str, Any] | None = None

    def serves(
        self, ambient: Ambient, structure: Structure, specs: tuple[TensorSpec, ...], constants: Mapping[str, Any]
    ) -> bool:
        """Returns whether it is for calls with exactly these specs."""
        alike = self.ambient == ambient and self.structure == structure and self.specs == specs
        return alike and self.holds(constants)

    def holds(self, constants: Mapping[str, Any]) -> bool:
        """Returns whether its code is right with these constants."""
        if self.every is not None and (self.every.keys() != constants.keys() or self._differing(self.every, constants)):
            return False
        return not self._differing(self.facts, constants)

    def changed(self, constants: Mapping[str, Any]) -> list[str]:
        """Returns the constants that it was made for with other values than these."""
        facts = self.facts if self.every is None else {**self.every, **self.facts}
        return self._differing(facts, constants) or sorted(set(constants) - set(facts))

    @staticmethod
    def _differing(facts: Mapping[str, Any], constants: Mapping[str, Any]) -> list[str]:
        return [name for name, value in facts.items() if Exact(constants.get(name, ABSENT)) != Exact(value)]


class Fp8Kind(NamedTuple):
    """What is known of calls with one structure in one autocast scope.

    Attributes:
        plain: The structure without the scope.
        key: The scope, without columns.
        columns: The columns of scales that code for such calls takes.
        request: What scales are updated by, where a custom recipe says so.
        structure: The structure with the scope; the same object each time, which compares fastest.
    """

    plain: Structure
    key: Any
    columns: tuple[Any, ...]
    request: Any
    structure: Structure


class Memo:
    """The variants of one compiled function and its counters. Thread-safe."""

    def __init__(self, on_stale: str = "recompile") -> None:
        self.on_stale = on_stale
        self.variants: tuple[Variant, ...] = ()
        self.structures: dict[int, Structure] = {}
        self.inlines: tuple[Any, ...] = ()
        self.fp8_kinds: tuple[Fp8Kind, ...] = ()
        self.keyed: tuple[tuple[Structure, Structure], ...] = ()
        self.keys: tuple[tuple[Any, Any, Any], ...] = ()
        self.captures = self.compiled_graphs = self.compiled_calls = self.eager_calls = 0

    def find(self, kind: Any, call: Any) -> Variant | None:
        """Returns the variant of a kind for a `Call`, if there is one."""
        ambient, structure, tensors = ambient_settings(kind), call.structure, call.tensors
        for variant in self.variants:
            if (
                variant.kind == kind
                and variant.ambient == ambient
                and (variant.structure is structure or variant.structure == structure)
                and matches(variant.specs, tensors, variant.need_grad)
                and ((not variant.facts and variant.every is None) or self._up_to_date(variant, call.state.constants))
            ):
                return variant
        return None

    def _up_to_date(self, variant: Variant, constants: Mapping[str, Any]) -> bool:
        if variant.holds(constants):
            return True
        if self.on_stale == "error":
            name = variant.changed(constants)[0]
            before = {**(variant.every or {}), **variant.facts}.get(name, ABSENT)
            raise StaleConstant(
                f"Expected the constant {name!r} to be {before!r}, as when the code that depends on it was compiled, "
                f"got {constants.get(name, ABSENT)!r}. Recompile: state, fn = sf.recompile(state, fn)."
            )
        return False

    def find_or_make(self, kind: Any, call: Any, make: Callable[[], Variant]) -> Variant:
        """Returns the variant for a call; makes it once, whatever the number of threads that ask."""
        found = self.find(kind, call)
        if found is None:
            with compile_lock:
                found = self.find(kind, call)
                if found is None:
                    found = make()
                    if not any(found is known for known in self.variants):
                        self.variants = (*self.variants, found)
        return found

    def keyed_structure(self, structure: Structure) -> Structure | None:
        """Returns the structure of calls that take a key besides these inputs; None if none is known to."""
        for plain, keyed in self.keyed:
            if plain is structure or plain == structure:
                return keyed
        return None

    def learn_key(self, structure: Structure) -> Structure:
        """Remembers that calls with this structure take a key; returns it with one."""
        plain = replace(structure, scope=None, keyed=False)
        found = self.keyed_structure(plain)
        if found is None:
            found = replace(plain, keyed=True)
            self.keyed = (*self.keyed, (plain, found))
        return found

    def knows(self, structure: Structure) -> bool:
        """Returns whether there is code for calls with this structure."""
        return any(variant.structure == structure for variant in self.variants)

    def scope_key(self, scope: Any, weights: Any) -> Any:
        """Returns the key of a scope, without columns."""
        for known, of_weights, key in self.keys:
            if known is scope and of_weights == weights:
                return key
        key = scope_key(scope, (), weights)
        self.keys = (*self.keys[-7:], (scope, weights, key))
        return key

    def fp8_kind(self, structure: Structure, key: Any) -> Fp8Kind:
        """Returns what is known of calls with this structure in an autocast scope.

        Args:
            structure: Of the inputs.
            key: The `ScopeKey`, without columns.
        """
        for kind in self.fp8_kinds:
            if kind.key == key and (kind.plain is structure or kind.plain == structure):
                return kind
        return self.learn(structure, key, (), None)

    def learn(self, structure: Structure, key: Any, columns: tuple[Any, ...], request: Any) -> Fp8Kind:
        """Remembers which columns of scales calls with this structure need, besides those known already."""
        others = [kind for kind in self.fp8_kinds if not (kind.key == key and kind.plain == structure)]
        known = next((kind.columns for kind in self.fp8_kinds if kind.key == key and kind.plain == structure), ())
        every = (*known, *(column for column in columns if column not in known))
        kind = Fp8Kind(structure, key, every, request, replace(structure, scope=key._replace(columns=every)))
        self.fp8_kinds = (*others, kind)
        return kind

    def info(self) -> CacheInfo:
        """Returns the counters."""
        return CacheInfo(self.captures, self.compiled_graphs, self.compiled_calls, self.eager_calls)


def launch_code(memo: Memo, code: Code, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Runs compiled code. Casts are already in the graph, so autocast must not act on it again."""
    memo.compiled_calls += 1
    if torch.is_inference_mode_enabled():  # its tensors could not be saved for a backward, and may go into a state
        with torch.inference_mode(False), torch.no_grad():
            return launch_code(memo, code, tensors)
    if is_any_autocast_enabled():
        with disable_autocast():
            return code(tensors)
    return code(tensors)


__all__ = ["CacheInfo", "Memo", "Variant", "launch_code"]
