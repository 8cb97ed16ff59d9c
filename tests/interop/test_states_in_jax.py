"""A state in a JAX program: what is static in it, gradients through several steps, amaxes, impure functions."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.utils._pytree as torch_pytree
from jax import lax
from torch import nn

import scoped_fn as sf
from scoped_fn.interop import jax_to_torch, to_jax, torch_to_jax
from scoped_fn.state import tree_structure
from scoped_fn.state.exact import Exact
from tests.helpers import compiled

VALUES: list[Any] = [1, 1.0, True, 0.0, -0.0, 0, False, float("nan"), "1", (1, 0.0), (1, -0.0), (True, 0.0), None]


def with_constant(value: Any) -> sf.CompilerState:
    return sf.set_constant(sf.init_state(), "c", value)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_states_are_alike_only_if_their_constants_are_the_same(value: Any) -> None:
    alike = [
        i for i, other in enumerate(VALUES)
        if tree_structure(with_constant(value)) == tree_structure(with_constant(other))
    ]  # fmt: skip
    assert alike == [next(i for i, other in enumerate(VALUES) if other is value)]
    assert sf.tree_equal(with_constant(value), with_constant(value))


def test_exact_values_hash_as_they_compare() -> None:
    parts = [*VALUES, frozenset([1]), frozenset([True]), np.float32(0.0), np.float32(-0.0), 1j, complex(0, -0.0)]
    assert len({Exact(part) for part in parts}) == len(parts)
    assert Exact(float("nan")) == Exact(float("nan"))
    assert Exact({"a": 1, "b": 0.0}) == Exact({"b": 0.0, "a": 1}) != Exact({"a": 1, "b": -0.0})


def test_another_constant_is_another_call() -> None:
    def scaled(state: Any, x: torch.Tensor) -> torch.Tensor:
        constant = state.constants["c"]
        return x * 100 if isinstance(constant, bool) else x / constant

    bridge, one = to_jax(scaled), jnp.ones(1)
    for call in (bridge, jax.jit(bridge)):
        found = [float(call(torch_to_jax(with_constant(c)), one)[0]) for c in (1, True, 0.0, -0.0)]
        assert found == [1.0, 100.0, np.inf, -np.inf]


@pytest.mark.parametrize("loop", ["scan", "python"])
def test_gradients_through_steps_with_buffers_and_dropout_are_torchs(loop: str) -> None:
    torch.manual_seed(0)
    model, xs = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)), torch.randn(3, 5, 4)
    state, fn = compiled(model, (xs[0],))
    bridge, given = to_jax(fn), torch_to_jax(xs)

    def theirs(params: Any) -> Any:
        carry, total = torch_to_jax(state), 0.0
        if loop == "scan":
            return (lax.scan(lambda carry, x: bridge(carry, params, x), carry, given)[1] ** 3).sum()
        for x in given:
            carry, out = bridge(carry, params, x)
            total = total + (out**3).sum()
        return total

    def ours(params: Any) -> Any:
        carry, total = state, torch.zeros(())
        for x in xs:
            carry, out = fn(carry, params, x)
            total = total + (out**3).sum()
        return total

    found, expected = jax.grad(theirs)(torch_to_jax(fn.params)), torch.func.grad(ours)(fn.params)
    for name, grad in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), grad.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_amaxes_are_recorded_under_a_gradient_as_in_torch() -> None:
    torch.manual_seed(0)
    xs = torch.randn(3, 16, 16)
    state = sf.autocast(sf.init_state(), sf.DelayedScaling(amax_history_len=3))
    state, fn = sf.compile(state, nn.Linear(16, 16), (xs[0],), backend="eager")
    bridge = to_jax(fn)

    def theirs(params: Any) -> Any:
        after, outs = lax.scan(lambda carry, x: bridge(carry, params, x), torch_to_jax(state), torch_to_jax(xs))
        return outs.sum(), after

    def ours(params: Any) -> Any:
        after, total = state, torch.zeros(())
        for x in xs:
            after, out = fn(after, params, x)
            total = total + out.sum()
        return total, after

    _, after = jax.grad(theirs, has_aux=True)(torch_to_jax(fn.params))
    _, expected = torch.func.grad(ours, has_aux=True)(fn.params)
    history = expected.fp8[fn.owner].amax_history
    assert history.any()
    np.testing.assert_array_equal(np.asarray(after.fp8[fn.owner].amax_history), history.detach().numpy())


def test_a_function_that_draws_hidden_numbers_is_refused() -> None:
    before = torch.get_rng_state()
    with pytest.raises(
        TypeError, match=r"Expected a function that draws no numbers from torch's generator.*sf\.random"
    ):
        to_jax(lambda x: torch.nn.functional.dropout(x, 0.5))(jnp.ones(3))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("operation", [operator.floordiv, operator.mod])
def test_a_function_may_divide_by_integers(operation: Any) -> None:
    found = to_jax(operation)(jnp.array([7, 9]), jnp.array([2, 4]))
    assert found.tolist() == operation(np.array([7, 9]), np.array([2, 4])).tolist()


class Names(list):
    """A list of its own class."""


@pytest.mark.parametrize("container", [Names([torch.ones(1)]), {torch.ones(1)}], ids=["list", "set"])
def test_a_container_that_nobody_knows_is_refused(container: Any) -> None:
    with pytest.raises(TypeError, match=r"Expected arrays, numbers, .*, got a (Names|set)\. Register it"):
        torch_to_jax({"a": container})


def test_the_order_of_keys_in_an_argument_does_not_matter() -> None:
    first = to_jax(lambda values: next(iter(values["inner"].values())))
    for given in ({"b": 1.0, "a": 2.0}, {"a": 2.0, "b": 1.0}):
        arrays = {"inner": {name: jnp.float32(value) for name, value in given.items()}}
        assert first(arrays) == jax.jit(first)(arrays) == 2.0


def test_a_state_that_was_trained_in_jax_goes_on_in_torch() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    state, fn = sf.compile(sf.init_state(), torch.nn.BatchNorm1d(4), (x,), backend="eager")
    assert sf.tree_equal(jax_to_torch(torch_to_jax({"state": [state]})), {"state": [state]})
    there, _ = to_jax(fn)(torch_to_jax(state), torch_to_jax(fn.params), torch_to_jax(x))
    back, _ = fn(jax_to_torch(there), fn.params, x)
    assert back.buffers[fn.owner]["num_batches_tracked"] == 2
    assert sf.tree_equal(back, fn(fn(state, fn.params, x)[0], fn.params, x)[0])


@pytest.mark.parametrize("of", [lambda norm: norm, lambda norm: norm.forward], ids=["module", "method"])
def test_a_module_that_changes_its_buffers_is_refused_and_keeps_them(of: Any) -> None:
    norm, x = torch.nn.BatchNorm1d(4), jnp.arange(8.0).reshape(2, 4)
    with pytest.raises(TypeError, match=r"changes its buffers \(running_mean, running_var, num_batches_tracked\)"):
        to_jax(of(norm))(x)
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [0.0] * 4
    assert norm.num_batches_tracked == 0
    assert np.allclose(to_jax(of(norm.eval()))(x), x)


def test_a_module_is_no_tree() -> None:
    for call in (torch_to_jax, lambda module: to_jax(lambda m, x: m(x))(module, jnp.ones((1, 2)))):
        with pytest.raises(TypeError, match=r"got the module Linear, whose tensors would be overlooked. Pass dict"):
            call(torch.nn.Linear(2, 2))


class Counting(nn.Module):
    """Assigns its buffer anew, and has others that compare in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        for name, buffer in {
            "count": torch.zeros(()),
            "nan": torch.tensor([float("nan"), 1.0]),
            "sparse": torch.eye(2).to_sparse(),
            "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
            "expanded": torch.ones(1).expand(3),
            "fp8": torch.ones(2).to(torch.float8_e4m3fn),
        }.items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count = self.count + 1
        return x * 2


def test_a_buffer_that_is_assigned_anew_is_a_change_and_strange_ones_are_none() -> None:
    module, x = Counting(), jnp.ones(2)
    with pytest.raises(TypeError, match=r"got the module Counting, which changes its buffers \(count\)"):
        to_jax(module)(x)
    assert module.count == 0
    assert to_jax(module.eval())(x).tolist() == [2.0, 2.0]


class LooksAtItsParts:
    """A node that asks its child for its shape when it is built."""

    def __init__(self, weight: Any) -> None:
        self.weight, self.size = weight, weight.shape[0]


torch_pytree.register_pytree_node(
    LooksAtItsParts, lambda node: ([node.weight], None), lambda parts, _: LooksAtItsParts(*parts)
)


def test_a_node_that_looks_at_its_parts_crosses() -> None:
    assert jax_to_torch(LooksAtItsParts(jnp.ones((2, 3)))).size == 2
    assert jax_to_torch([LooksAtItsParts(jnp.ones((2, 3), jnp.int32))])[0].weight.dtype == torch.int32
