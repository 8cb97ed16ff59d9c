"""Models that draw, small enough to differentiate twice, and the ways to call them from one state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf

X = torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(6, 4)


class Noisy(nn.Module):
    """Dropout, noise and dropout again between two layers; float64."""

    def __init__(self, *, region: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
        self.region = region

    def hidden(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x).tanh(), 0.4, self.training)
        return (hidden + 0.1 * torch.randn_like(hidden)).sin()

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.hidden, x, use_reentrant=False) if self.region else self.hidden(x)
        return (F.dropout(self.second(hidden), 0.3, self.training) * (1 + torch.rand(3))).square().sum()


def noisy(**options: Any) -> nn.Module:
    """The model with the same parameters each time."""
    torch.manual_seed(0)
    return Noisy(**options)


def smooth(x: Tensor) -> Tensor:
    """A function of a tensor with two draws, whose derivatives of all orders are not zero."""
    return (F.dropout(x.sin() * x, 0.4) * torch.rand_like(x)).square().sum() + (x**3 * torch.randn_like(x)).sum()


def noise(x: Tensor) -> Tensor:
    """Two draws that depend on the input by its shape alone."""
    return torch.rand_like(x) + 2 * torch.randn_like(x)


def compiled(function: Callable[..., Any], *inputs: Any, seed: int = 5, **options: Any) -> tuple[Any, sf.CompiledFn]:
    """A state with a seed, and the compiled function."""
    return sf.compile(sf.init_state(key=seed), function, inputs, **{"backend": "eager", **options})


def params_of(fn: sf.CompiledFn, *, grad: bool = True) -> dict[str, Tensor]:
    """The parameters as new leaves."""
    return {name: one.detach().clone().requires_grad_(grad) for name, one in fn.params.items()}


def by_autograd(state: sf.CompilerState, fn: sf.CompiledFn, x: Tensor = X) -> Any:
    """The next state, the loss and the gradients."""
    params = params_of(fn)
    after, loss = fn(state, params, x)
    loss.backward()
    return after, loss.detach(), {name: one.grad for name, one in params.items()}


def by_value_and_grad(state: sf.CompilerState, fn: sf.CompiledFn, x: Tensor = X) -> Any:
    """The same, from one graph."""
    after, (loss, grads) = sf.value_and_grad(fn)(state, params_of(fn, grad=False), x)
    return after, loss, grads


def by_torch_func(state: sf.CompilerState, fn: sf.CompiledFn, x: Tensor = X) -> Any:
    """The same, by torch.func."""

    def loss_of(params: dict[str, Tensor]) -> Any:
        after, loss = fn(state, params, x)
        return loss, after

    grads, (loss, after) = torch.func.grad_and_value(loss_of, has_aux=True)(params_of(fn, grad=False))
    return after, loss, grads


def without_gradients(state: sf.CompilerState, fn: sf.CompiledFn, x: Tensor = X) -> Any:
    """The next state and the loss."""
    with torch.no_grad():
        after, loss = fn(state, params_of(fn, grad=False), x)
    return after, loss


WAYS = {"autograd": by_autograd, "value_and_grad": by_value_and_grad, "torch.func": by_torch_func}
