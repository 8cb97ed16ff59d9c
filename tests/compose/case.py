"""`Case`: a function or module with small inputs, and how to call it, eager or compiled, without a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import scoped_fn as sf
from tests.helpers import compiled

Function = Callable[..., Any]
Arguments = tuple[Any, ...]


FORWARD_RULE = "the custom function has no jvp rule"
WRITES_BATCH = "vmap cannot write batched values in place into a tensor that is not batched"


@dataclass(frozen=True, eq=False)
class Case:
    """Something to compile and to differentiate.

    Attributes:
        name: Its name in test ids.
        make: Returns a new module, or the function.
        inputs: Returns the inputs, without parameters; the same values each time.
        differentiable: Which inputs are differentiated and batched; parameters always are, before them.
        eager_cannot: Name or tag of a transform -> why eager torch raises for it.
        twin: Returns the same function written in other operations, to compare with where eager is of no use.
        eager_wrong: Name of a transform -> why eager torch gives a wrong number for it and says nothing.
        deep: Whether it is small and smooth enough for the transforms of third order.
        rtol: Relative tolerance against eager; the absolute one is a hundredth of it.
    """

    name: str
    make: Callable[[], Any]
    inputs: Callable[[], Arguments]
    differentiable: tuple[int, ...] = (0,)
    eager_cannot: Mapping[str, str] = field(default_factory=dict)
    twin: Callable[[], Any] | None = None
    eager_wrong: Mapping[str, str] = field(default_factory=dict)
    deep: bool = False
    rtol: float = 1e-8


def named(function: Function, inputs: Callable[[], Arguments], *differentiable: int, **options: Any) -> Case:
    """A case that has the function's name."""
    name = function.__name__.replace("_", " ")
    return Case(name, lambda: function, inputs, differentiable or (0,), **options)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random numbers that depend on shape and seed alone."""
    generator = torch.Generator().manual_seed(17 + seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def arguments(case: Case) -> Arguments:
    """What a call takes after the state: for a module, parameters as plain tensors and then the inputs."""
    made = case.make()
    if not isinstance(made, nn.Module):
        return case.inputs()
    return {name: one.detach().clone() for name, one in made.named_parameters()}, *case.inputs()


def eager_call(case: Case) -> Function:
    """The eager function of `arguments(case)`; a module's buffers are as new in every call."""
    return _eager_call(case.make())


def twin_call(case: Case) -> Function | None:
    """The eager function of the twin, if there is one."""
    return _eager_call(case.twin()) if case.twin else None


def _eager_call(made: Any) -> Function:
    if not isinstance(made, nn.Module):
        return made

    def call(params: dict[str, torch.Tensor], *inputs: Any) -> Any:
        buffers = {name: one.clone() for name, one in made.named_buffers()}
        return torch.func.functional_call(made, {**params, **buffers}, inputs)

    return call


def compiled_call(case: Case, backend: str = "eager") -> tuple[Function, sf.CompiledFn]:
    """The compiled function of `arguments(case)`, its state dropped, and the `CompiledFn` to look into."""
    state, fn = compiled(case.make(), case.inputs(), backend=backend)
    return stateless(fn, state), fn


def stateless(fn: sf.CompiledFn, state: sf.CompilerState) -> Function:
    """The compiled function as a plain one: every call starts from the same state."""
    return lambda *args: fn(state, *args)[1]


def over_differentiable(case: Case, call: Function) -> tuple[Function, Arguments]:
    """The call as a function of what is differentiable, the rest bound, and these arguments."""
    whole = arguments(case)
    skipped = len(whole) - len(case.inputs())
    places = (*range(skipped), *(skipped + i for i in case.differentiable))

    def function(*chosen: Any) -> Any:
        merged = list(whole)
        for place, value in zip(places, chosen, strict=True):
            merged[place] = value
        return call(*merged)

    return function, tuple(whole[place] for place in places)


__all__ = [
    "FORWARD_RULE",
    "WRITES_BATCH",
    "Arguments",
    "Case",
    "Function",
    "arguments",
    "compiled_call",
    "eager_call",
    "named",
    "numbers",
    "over_differentiable",
    "stateless",
    "twin_call",
]
