"""JAX functions inside what is compiled: both captures, both backends, every transform."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jvp, vmap

import scoped_fn as sf
from scoped_fn.interop import from_jax
from tests.interop.test_from_jax import XS, X, Y, jax_pair, torch_pair

W = torch.tensor([0.7, -0.4, 1.2])


def model_of(pair: Callable[..., Any]) -> Callable[..., Any]:
    """A function with operations of torch before and after the pair."""
    return lambda w, x: (pair(torch.tanh(w * x), Y)[0] * x).sum()


def backward(call: Callable[..., Any]) -> torch.Tensor | None:
    w = W.clone().requires_grad_()
    call(w, X).backward()
    return w.grad


USES: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "call": lambda call: call(W, X),
    "no_grad": lambda call: torch.no_grad()(call)(W, X),
    "backward": backward,
    "vmap": lambda call: vmap(lambda x: call(W, x))(XS),
    "vmap(grad)": lambda call: vmap(grad(call), (None, 0))(W, XS),
    "jvp": lambda call: jvp(lambda w: call(w, X), (W,), (X,)),
    "hessian": lambda call: hessian(lambda w: call(w, X))(W),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_a_compiled_function_with_a_jax_function_inside(capture: str, use: str) -> None:
    _agrees(use, capture, "eager")


@pytest.mark.parametrize("use", ["backward", "vmap(grad)"])
def test_with_inductor(use: str) -> None:
    _agrees(use, "dynamo", "inductor")


def _agrees(use: str, capture: str, backend: str) -> None:
    state, fn = sf.compile(sf.init_state(), model_of(from_jax(jax_pair)), (W, X), backend=backend, capture=capture)
    found = USES[use](lambda w, x: fn(state, w, x)[1])
    torch.testing.assert_close(found, USES[use](model_of(torch_pair)), rtol=1e-4, atol=1e-5)
    assert fn.cache_info().eager_calls == 0


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_a_whole_step_is_one_compiled_graph(capture: str) -> None:
    state, fn = sf.compile(sf.init_state(), model_of(from_jax(jax_pair)), (W, X), backend="eager", capture=capture)
    step = sf.value_and_grad(fn)
    step(state, W, X)
    before = fn.cache_info()
    _, (value, slope) = step(state, W, X)
    assert fn.cache_info().compiled_calls == before.compiled_calls + 1
    reference = model_of(torch_pair)
    torch.testing.assert_close(value, reference(W, X))
    torch.testing.assert_close(slope, grad(reference)(W, X))


class Activated(nn.Module):
    """A module with buffers and a JAX function."""

    def __init__(self, activation: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.norm, self.activation = nn.Linear(3, 3), nn.BatchNorm1d(3), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.norm(self.linear(x)), 2.0, kind="scaled").sum()


def _jax_activation(x: Any, scale: float, kind: str) -> Any:
    return jnp.tanh(x) * scale if kind == "scaled" else x


def _torch_activation(x: torch.Tensor, scale: float, kind: str) -> torch.Tensor:
    return x.tanh() * scale if kind == "scaled" else x


def test_a_module_trains_as_with_the_torch_function() -> None:
    results = []
    for activation in (from_jax(_jax_activation), _torch_activation):
        torch.manual_seed(0)
        state, fn = sf.compile(sf.init_state(), Activated(activation), (XS,), backend="eager")
        step, params = sf.value_and_grad(fn), {name: param.detach() for name, param in fn.params.items()}
        for _ in range(3):
            state, (value, grads) = step(state, params, XS)
            params = {name: params[name] - 0.1 * slope for name, slope in grads.items()}
        results.append((value, params, dict(state.buffers[fn.owner])))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_the_compiled_graph_holds_one_operation_for_the_jax_function() -> None:
    state, fn = sf.compile(sf.init_state(), model_of(from_jax(jax_pair)), (W, X), backend="eager")
    assert str(fn.forward_graph).count("scoped_fn_interop") == 1
    fn(state, W, X)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_compile_leaves_it_out_of_its_graphs() -> None:
    module = Activated(from_jax(_jax_activation)).eval()
    compiled = torch.compile(module, backend="eager", dynamic=False)
    torch.testing.assert_close(compiled(XS), module(XS))


def test_a_compiled_function_keeps_the_jax_function_that_it_calls() -> None:
    f = from_jax(jax_pair)
    state, fn = sf.compile(sf.init_state(), model_of(f), (W, X), backend="eager")
    expected = fn(state, W, X)[1]
    alive = weakref.ref(f)
    del f
    gc.collect()
    assert alive() is not None
    torch.testing.assert_close(fn(state, W, X)[1], expected)
    del fn
    gc.collect()
    assert alive() is None
