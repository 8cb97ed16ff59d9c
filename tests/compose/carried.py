"""Stateful functions of several kinds, compiled and the user's own, each with its stateless twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import scoped_fn as sf
from tests.compose.case import Arguments, Function, numbers
from tests.compose.modules import batch_norm, seeded
from tests.compose.trees import scalar
from tests.helpers import compiled

StatefulFn = Callable[..., tuple[sf.CompilerState, Any]]


@dataclass(frozen=True)
class Subject:
    """A stateful function with a scalar value.

    Attributes:
        state: The state to call it with.
        function: `(state, *args) -> (state, value)`.
        twin: `(*args) -> value`, in eager torch.
        args: A first argument that is shared, and a second one that `vmap` can take rows of.
        fn: The compiled function in it, if there is one.
    """

    state: sf.CompilerState
    function: StatefulFn
    twin: Function
    args: Arguments
    fn: sf.CompiledFn | None


class Squared(nn.Module):
    """A network and a loss, smooth and with one number for a row or for many."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.net(x) ** 2).sum()


def energy(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ((weight * x).sin() ** 2).sum() * weight[0] + x.square().sum()


def compiled_function() -> Subject:
    args = numbers(3), numbers(3, seed=1)
    state, fn = compiled(energy, args)
    return Subject(state, fn, energy, args, fn)


def compiled_module() -> Subject:
    model, x = seeded(Squared()), numbers(3)
    state, fn = compiled(model, (x,))
    params = {name: one.detach().clone() for name, one in fn.params.items()}
    return Subject(state, fn, lambda params, x: torch.func.functional_call(model, params, (x,)), (params, x), fn)


def own_function() -> Subject:
    args = numbers(3), numbers(3, seed=1)
    return Subject(sf.init_state(), lambda state, *args: (state, energy(*args)), energy, args, None)


def own_around_compiled() -> Subject:
    inner = compiled_function()

    def twice(state: sf.CompilerState, weight: torch.Tensor, x: torch.Tensor) -> tuple[sf.CompilerState, Any]:
        state, first = inner.function(state, weight, x)
        state, second = inner.function(state, weight.exp(), x)
        return state, first * second

    return Subject(inner.state, twice, lambda w, x: energy(w, x) * energy(w.exp(), x), inner.args, inner.fn)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "compiled function": compiled_function,
    "compiled module": compiled_module,
    "own function": own_function,
    "own around compiled": own_around_compiled,
}


@dataclass(frozen=True)
class Normed:
    """A compiled network with batch norm in training.

    Attributes:
        state: The state with its buffers.
        fn: The compiled function.
        loss: `(state, params, x) -> (state, value)`.
        params: Parameters that require no gradient.
        twin: `(params, x) -> (value, buffers after the call)`, in eager torch.
    """

    state: sf.CompilerState
    fn: sf.CompiledFn
    loss: StatefulFn
    params: dict[str, torch.Tensor]
    twin: Function


def normed() -> Normed:
    model = batch_norm()
    state, fn = compiled(model, (numbers(4, 2),))

    def loss(state: sf.CompilerState, params: Any, x: torch.Tensor) -> tuple[sf.CompilerState, torch.Tensor]:
        state, out = fn(state, params, x)
        return state, scalar(lambda: out)()

    def twin(params: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        buffers = {name: one.clone() for name, one in model.named_buffers()}
        out = torch.func.functional_call(model, {**params, **buffers}, (x,))
        return scalar(lambda: out)(), {name: one.detach() for name, one in buffers.items()}

    return Normed(state, fn, loss, {name: one.detach().clone() for name, one in fn.params.items()}, twin)
