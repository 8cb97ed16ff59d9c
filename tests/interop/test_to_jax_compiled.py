"""Compiled functions, whole steps and states inside JAX programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import scoped_fn as sf
from scoped_fn.interop import jax_to_torch, to_jax, torch_to_jax

X = torch.linspace(-1, 1, 24).reshape(8, 3)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def close(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(torch_to_jax(expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_module_under_jit_and_grad(backend: str) -> None:
    state, fn = sf.compile(sf.init_state(), network(), (X,), backend=backend)
    arrays, params, x = torch_to_jax((state, fn.params, X))
    f = to_jax(fn)
    after, out = jax.jit(f)(arrays, params, x)
    expected_after, expected = fn(state, fn.params, X)
    close(out, expected)
    close(after, expected_after)
    grads = jax.jit(jax.grad(lambda params: f(arrays, params, x)[1].sum()))(params)
    expected.sum().backward()
    for name, param in fn.params.items():
        np.testing.assert_allclose(grads[name], param.grad, rtol=1e-4, atol=1e-5)


def test_a_whole_step_under_jit() -> None:
    state, fn = sf.compile(sf.init_state(), lambda w, x: (x @ w).tanh().sum(), (torch.ones(3), X), backend="eager")
    step = sf.value_and_grad(fn)
    found = jax.jit(to_jax(step))(*torch_to_jax((state, torch.ones(3), X)))
    close(found, step(state, torch.ones(3), X))


def test_a_state_is_the_carry_of_a_scan_with_a_compiled_step_inside() -> None:
    state, fn = sf.compile(sf.init_state(), network(), (X,), backend="eager")
    f, (arrays, params, x) = to_jax(fn), torch_to_jax((state, fn.params, X))

    def train(carry: Any, _: None) -> Any:
        state, params = carry

        def loss(params: Any) -> Any:
            after, out = f(state, params, x)
            return (out**2).mean(), after

        (value, after), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return (after, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)), value

    (after, params), values = jax.jit(lambda *carry: jax.lax.scan(train, carry, None, length=4))(arrays, params)
    expected_values, weights = [], {name: param.detach() for name, param in fn.params.items()}
    for _ in range(4):
        state, (value, grads) = sf.value_and_grad(_loss_of(fn))(state, weights)
        weights = {name: weights[name] - 0.1 * grad for name, grad in grads.items()}
        expected_values.append(value)
    close(values, torch.stack(expected_values))
    close(params, weights)
    close(after, state)
    assert isinstance(after, sf.CompilerState)
    assert int(after.buffers[fn.owner]["1.num_batches_tracked"]) == 4
    assert fn.cache_info().eager_calls == 0


def _loss_of(fn: sf.CompiledFn) -> Any:
    def loss(state: sf.CompilerState, weights: Any) -> Any:
        state, out = fn(state, weights, X)
        return state, (out**2).mean()

    return loss


def test_a_batch_is_one_compiled_call() -> None:
    state, fn = sf.compile(sf.init_state(), lambda w, x: (x @ w).tanh().sum(), (torch.ones(3), X), backend="eager")
    f, arrays = to_jax(fn), torch_to_jax(state)
    many = jnp.stack([jnp.ones(3) * i for i in range(5)])
    mapped = jax.jit(jax.vmap(lambda w: f(arrays, w, jnp.asarray(X.numpy()))[1]))
    mapped(many)
    before = fn.cache_info()
    found = mapped(many)
    after = fn.cache_info()
    assert after.compiled_calls == before.compiled_calls + 1
    assert after.captures == before.captures
    assert after.eager_calls == 0
    np.testing.assert_allclose(found, jnp.tanh(many @ X.numpy().T).sum(1), rtol=1e-5, atol=1e-6)


def test_a_compiled_function_is_compiled_when_jax_traces_not_when_it_runs() -> None:
    state, fn = sf.compile(sf.init_state(), lambda x: x.sin(), (torch.ones(3),), backend="eager")
    f, arrays = to_jax(fn), torch_to_jax(state)
    lowered = jax.jit(lambda x: f(arrays, x)[1]).lower(jnp.ones(7))
    graphs = fn.cache_info().compiled_graphs
    lowered.compile()(jnp.ones(7))
    assert fn.cache_info().compiled_graphs == graphs


def test_stacked_states_are_a_batch() -> None:
    state, fn = sf.compile(sf.init_state(), network(), (X,), backend="eager")
    f, (arrays, params, x) = to_jax(fn), torch_to_jax((state, fn.params, X))
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), arrays)
    after, out = jax.vmap(lambda state, x: f(state, params, x))(both, jnp.stack([x, x + 1]))
    for i, rows in enumerate((X, X + 1)):
        expected_after, expected = fn(state, fn.params, rows)
        close(out[i], expected)
        close(jax.tree.map(lambda leaf, i=i: leaf[i], after), expected_after)


def test_buffers_of_64_bits_come_back_to_torch_as_they_were() -> None:
    state, fn = sf.compile(sf.init_state(), network(), (X,), backend="eager")
    seen = []
    f = to_jax(lambda state: (seen.append(state.buffers[fn.owner]["1.num_batches_tracked"].dtype), state)[1])
    after = f(torch_to_jax(state))
    assert set(seen) == {torch.int64}
    assert after.buffers[fn.owner]["1.num_batches_tracked"].dtype == jnp.int32
    with jax.enable_x64(True):
        assert sf.tree_equal(jax_to_torch(f(torch_to_jax(state))), state)


def test_an_fp8_state_goes_through() -> None:
    state = sf.autocast(sf.init_state(), sf.DelayedScaling(amax_history_len=4))
    model = nn.Linear(16, 16)
    x = torch.linspace(-1, 1, 256).reshape(16, 16)
    state, fn = sf.compile(state, model, (x,), backend="eager")
    arrays, params, rows = torch_to_jax((state, fn.params, x))
    after, out = jax.jit(to_jax(fn))(arrays, params, rows)
    with torch.no_grad():  # amaxes are recorded where a gradient is wanted, so by whole steps
        close((after, out), fn(state, fn.params, x))
    step = sf.value_and_grad(_sum_of(fn))
    close(jax.jit(to_jax(step))(arrays, params, rows), step(state, fn.params, x))


def _sum_of(fn: sf.CompiledFn) -> Any:
    def total(state: sf.CompilerState, params: Any, x: torch.Tensor) -> Any:
        state, out = fn(state, params, x)
        return state, out.sum()

    return total


def test_random_numbers_of_torch_are_refused() -> None:
    _, fn = sf.compile(sf.init_state(), nn.Dropout(0.5), (X,), backend="eager", rng="torch")
    for function in (fn, sf.value_and_grad(fn)):
        with pytest.raises(TypeError, match=r"depends on its arguments alone, got Dropout with rng='torch'"):
            to_jax(function)


class Doubled(torch.autograd.Function):
    """A custom Function without a rule for forward mode, whose backward is its own."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return cotangent * 20


def test_a_custom_backward_is_what_jax_uses() -> None:
    f = to_jax(Doubled.apply)
    assert jax.grad(lambda x: f(x).sum())(jnp.ones(2)).tolist() == [20.0, 20.0]
    with pytest.raises(Exception, match="jvp"):
        jax.jvp(f, (jnp.ones(2),), (jnp.ones(2),))


def _with_dropout() -> tuple[sf.CompilerState, sf.CompiledFn]:
    return sf.compile(sf.init_state(key=7), lambda x: nn.functional.dropout(x, 0.5), (torch.ones(64),), backend="eager")


def test_random_numbers_come_from_the_key_of_the_state() -> None:
    state, fn = _with_dropout()
    f, arrays, ones = to_jax(fn), torch_to_jax(state), jnp.ones(64)
    after, first = jax.jit(f)(arrays, ones)
    close((after, first), fn(state, torch.ones(64)))
    assert f(arrays, ones)[1].tolist() == first.tolist()
    slopes = jax.jit(jax.grad(lambda x: f(arrays, x)[1].sum()))(ones)
    assert slopes.tolist() == first.tolist()  # the mask of the forward
    assert f(after, ones)[1].tolist() != first.tolist()


def test_a_scan_moves_the_key_on_as_a_loop_does() -> None:
    state, fn = _with_dropout()
    f = to_jax(fn)
    after, rows = jax.jit(lambda state, xs: jax.lax.scan(f, state, xs))(torch_to_jax(state), jnp.ones((3, 64)))
    for row in rows:
        state, expected = fn(state, torch.ones(64))
        assert row.tolist() == expected.tolist()
    assert after.key.tolist() == state.key.tolist()


def test_one_key_gives_one_mask_to_a_batch_and_batched_keys_one_each() -> None:
    state, fn = _with_dropout()
    f, arrays = to_jax(fn), torch_to_jax(state)
    _, rows = jax.vmap(f, (None, 0))(arrays, jnp.ones((3, 64)))
    expected = fn(state, torch.ones(64))[1].tolist()
    assert rows.tolist() == [expected] * 3
    states = [sf.init_state(key=seed) for seed in range(3)]
    states = [replace(state, key=each.key) for each in states]
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(torch_to_jax, states))
    after, rows = jax.jit(jax.vmap(f))(both, jnp.ones((3, 64)))
    for i, own in enumerate(states):
        own_after, own_row = fn(own, torch.ones(64))
        assert rows[i].tolist() == own_row.tolist()
        assert after.key[i].tolist() == own_after.key.tolist()
