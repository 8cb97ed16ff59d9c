"""The state through transforms: buffers come back as auxiliary results, and what comes back can be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.compose.case import numbers
from tests.compose.modules import batch_norm
from tests.compose.quiet import QUIET
from tests.compose.trees import scalar, waves
from tests.helpers import assert_same, compiled, tensors

pytestmark = QUIET

Loss = Callable[[Any], tuple[torch.Tensor, Any]]
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def grad(loss: Loss, params: Any) -> tuple[Any, Any]:
    return torch.func.grad(loss, has_aux=True)(params)


def grad_and_value(loss: Loss, params: Any) -> tuple[Any, Any]:
    gradients, (value, aux) = torch.func.grad_and_value(loss, has_aux=True)(params)
    return (gradients, value), aux


def vjp(loss: Loss, params: Any) -> tuple[Any, Any]:
    value, pull, aux = torch.func.vjp(loss, params, has_aux=True)
    return (value, pull(torch.ones_like(value))), aux


def jvp(loss: Loss, params: Any) -> tuple[Any, Any]:
    *pushed, aux = torch.func.jvp(loss, (params,), (waves(params),), has_aux=True)
    return pushed, aux


def jacrev(loss: Loss, params: Any) -> tuple[Any, Any]:
    return torch.func.jacrev(loss, has_aux=True)(params)


def autograd(loss: Loss, params: Any) -> tuple[Any, Any]:
    leaves = {name: one.clone().requires_grad_() for name, one in params.items()}
    value, aux = loss(leaves)
    (slope,) = torch.autograd.grad(value, leaves["0.weight"], create_graph=True)
    return torch.autograd.grad(value + slope.square().sum(), list(leaves.values())), aux


WAYS = pytest.mark.parametrize("way", [grad, grad_and_value, vjp, jvp, jacrev, autograd], ids=lambda way: way.__name__)


def eager_loss(model: nn.Module, x: torch.Tensor) -> Loss:
    """The loss of the module, and its buffers after the call."""

    def loss(params: Any) -> tuple[torch.Tensor, Any]:
        buffers = {name: one.clone() for name, one in model.named_buffers()}
        value = scalar(lambda: torch.func.functional_call(model, {**params, **buffers}, (x,)))()
        return value, {name: one.detach() for name, one in buffers.items()}

    return loss


def compiled_loss(fn: sf.CompiledFn, state: sf.CompilerState, x: torch.Tensor) -> Loss:
    """The loss of the compiled module, and the next state."""

    def loss(params: Any) -> tuple[torch.Tensor, sf.CompilerState]:
        after, out = fn(state, params, x)
        return scalar(lambda: out)(), after

    return loss


@WAYS
def test_changed_buffers_come_back_as_auxiliary_results(way: Any) -> None:
    model, x = batch_norm(), numbers(4, 2)
    state, fn = compiled(model, (x,))
    params = {name: one.detach() for name, one in fn.params.items()}
    expected, buffers = way(eager_loss(model, x), params)
    result, after = way(compiled_loss(fn, state, x), params)
    assert_same(result, expected, **CLOSE)
    assert_same(dict(after.buffers[fn.owner]), buffers, **CLOSE)
    assert fn.cache_info().eager_calls == 0


@WAYS
def test_the_state_that_comes_back_can_be_used(way: Any) -> None:
    model, x = batch_norm(), numbers(4, 2)
    state, fn = compiled(model, (x,))
    params = {name: one.detach() for name, one in fn.params.items()}
    for step in range(3):
        _, state = way(compiled_loss(fn, state, numbers(4, 2, seed=step)), params)
        assert state.buffers[fn.owner]["1.num_batches_tracked"] == step + 1
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(one) for one in tensors(state))
    assert not any(one.requires_grad for one in tensors(state))
    assert_same(fn(state, params, x)[1], model(x).detach(), **CLOSE)


def test_a_state_that_no_call_changed_is_the_same_under_a_transform() -> None:
    state, fn = compiled(torch.sin, (numbers(3),))
    seen: list[sf.CompilerState] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        after, out = fn(state, x)
        seen.append(after)
        return out.sum()

    assert_same(torch.func.grad(loss)(numbers(3)), numbers(3).cos(), **CLOSE)
    assert_same(torch.func.vmap(loss)(numbers(2, 3)), numbers(2, 3).sin().sum(1), **CLOSE)
    assert all(after is state for after in seen)
