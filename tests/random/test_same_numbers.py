"""One state, one set of numbers: whatever compiles the function, and however it is called and differentiated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, jvp
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf
from tests.helpers import assert_same, fresh, process_unchanged
from tests.random.models import WAYS, X, compiled, noise, noisy, smooth, without_gradients
from tests.random.oracle import assert_bits, drawn, keys_of

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module")
def model() -> Any:
    """A model's state and compiled function."""
    return compiled(noisy(), X)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_value_gradients_and_next_key_are_the_same_in_each_way(model: Any, way: Any) -> None:
    state, fn = model
    after, loss, grads = way(state, fn)
    expected_after, expected_loss, expected_grads = WAYS["autograd"](state, fn)
    assert_same(loss, expected_loss, **CLOSE)
    assert_same(loss, without_gradients(state, fn)[1], **CLOSE)
    assert_same(grads, expected_grads, **CLOSE)
    for one in (after, expected_after, without_gradients(state, fn)[0]):
        assert_bits(one.key, keys_of(state.key, 5)[0])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_same_call_again_gives_the_same_bits(model: Any, way: Any) -> None:
    state, fn = model
    torch.manual_seed(1)
    first = way(state, fn)
    torch.manual_seed(2)
    second = way(state, fn)
    assert_same(first[1:], second[1:])
    assert sf.tree_equal(first[0], second[0])


def test_the_gradients_are_those_of_the_function_with_its_numbers_held(model: Any) -> None:
    """The model written by hand with JAX's numbers, differentiated by eager torch."""
    state, fn = model
    _, first_key, noise_key, last_key, scale_key = keys_of(state.key, 5)
    kept = drawn("bernoulli", first_key, 1 - 0.4, (6, 5)) / (1 - 0.4)
    added = 0.1 * drawn("normal", noise_key, (6, 5), dtype=torch.float64)
    kept_last = drawn("bernoulli", last_key, 1 - 0.3, (6, 3)) / (1 - 0.3)
    scale = 1 + drawn("uniform", scale_key, (3,))

    def by_hand(params: dict[str, Tensor]) -> Tensor:
        hidden = F.linear(X, params["first.weight"], params["first.bias"]).tanh() * kept
        last = F.linear((hidden + added).sin(), params["second.weight"], params["second.bias"]) * kept_last
        return (last * scale).square().sum()

    params = {name: one.detach() for name, one in noisy().named_parameters()}
    _, loss, grads = WAYS["autograd"](state, fn)
    assert_same(loss, by_hand(params), rtol=1e-6, atol=1e-6)
    assert_same(grads, grad(by_hand)(params), rtol=1e-6, atol=1e-6)


def test_inductor_draws_what_the_eager_backend_draws() -> None:
    results = []
    for backend in ("eager", "inductor"):
        state, fn = compiled(noisy(), X, backend=backend)
        results.append([way(state, fn) for way in WAYS.values()])
    for one, other in zip(*results, strict=True):
        assert_same(one[1:], other[1:], rtol=1e-10, atol=1e-10)
        assert_bits(one[0].key, other[0].key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_inductor_and_the_eager_backend_draw_the_same_bits(dtype: torch.dtype) -> None:
    def exact(x: Tensor) -> Any:
        return torch.rand_like(x), F.dropout(x, 0.5), torch.randint(0, 99, x.shape), torch.rand_like(x).uniform_(-1, 3)

    x = torch.ones(500, dtype=dtype)
    results = []
    for backend in ("eager", "inductor"):
        state, fn = compiled(exact, x, backend=backend)
        results.append(fn(state, x)[1])
    for one, other in zip(*results, strict=True):
        assert_bits(one, other)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_checkpointed_region_computes_again_with_its_own_numbers(model: Any, backend: str) -> None:
    state, fn = compiled(noisy(region=True), X, backend=backend)
    for way in WAYS.values():
        after, loss, grads = way(state, fn)
        plain = way(*model)
        assert_same((loss, grads), plain[1:], rtol=1e-10, atol=1e-10)
        assert_bits(after.key, plain[0].key)


def test_one_region_twice_draws_twice_and_computes_each_again_as_it_was() -> None:
    def regions(x: Tensor) -> Any:
        return [checkpoint(lambda x: F.dropout(x * x, 0.5), x, use_reentrant=False) for _ in range(3)]

    x = torch.linspace(1, 2, 40).requires_grad_()
    state, fn = compiled(regions, x)
    after, out = fn(state, x)
    key, *keys = keys_of(state.key, 4)
    assert_bits(after.key, key)
    for one, drawn_with in zip(out, keys, strict=True):
        kept = drawn("bernoulli", drawn_with, 0.5, (40,))
        assert torch.equal(one != 0, kept)
        (slope,) = torch.autograd.grad(one.sum(), x, retain_graph=True)
        assert_same(slope, torch.where(kept, 4 * x.detach(), 0.0))


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_memory_budget_leaves_the_numbers_as_they_are(model: Any, budget: float) -> None:
    state, fn = compiled(noisy(), X, passes=[sf.passes.memory_budget(budget)])
    for way in WAYS.values():
        assert_same(way(state, fn)[1:], way(*model)[1:], **CLOSE)


def test_recompiling_leaves_the_numbers_as_they_are(model: Any) -> None:
    state, fn = model
    _, other = sf.recompile(state, fn)
    assert_same(WAYS["autograd"](state, other)[1:], WAYS["autograd"](state, fn)[1:])


def test_a_draw_between_forward_and_backward_moves_nothing(model: Any) -> None:
    state, fn = model
    expected = WAYS["autograd"](state, fn)[2]
    params = fresh(fn.params)
    after, loss = fn(state, params, X)
    fn(after, params, X)
    torch.rand(5)
    loss.backward()
    assert_same({name: one.grad for name, one in params.items()}, expected)


def test_two_pending_forwards_have_a_mask_each(model: Any) -> None:
    state, fn = model
    first, second = fresh(fn.params), fresh(fn.params)
    middle, one = fn(state, first, X)
    _, two = fn(middle, second, X)
    two.backward()
    one.backward()
    assert_same({name: own.grad for name, own in first.items()}, WAYS["autograd"](state, fn)[2])
    assert_same({name: own.grad for name, own in second.items()}, WAYS["autograd"](middle, fn)[2])


def test_a_tangent_belongs_to_the_draw_of_its_value() -> None:
    state, fn = compiled(smooth, X)
    x, t = X.clone(), X.cos()
    value, tangent = jvp(lambda x: fn(state, x)[1], (x,), (t,))
    _, (value_again, tangent_again) = sf.jvp(fn)(state, (x,), (t,))
    assert_same((value, tangent), (value_again, tangent_again), **CLOSE)
    assert_same(value, fn(state, x)[1], **CLOSE)
    assert_same(tangent, (grad(lambda x: fn(state, x)[1])(x) * t).sum(), rtol=1e-10, atol=1e-10)


def test_the_pull_of_a_vjp_belongs_to_its_value() -> None:
    state, fn = compiled(smooth, X)
    after, (value, pull) = sf.vjp(fn)(state, X)
    assert_same(value, fn(state, X)[1], **CLOSE)
    assert_same(pull(torch.ones((), dtype=X.dtype))[0], grad(lambda x: fn(state, x)[1])(X), **CLOSE)
    assert_bits(after.key, fn(state, X)[0].key)


def test_torchs_generators_are_neither_read_nor_moved(model: Any) -> None:
    state, fn = model
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with process_unchanged():
            results.append([way(state, fn)[1:] for way in WAYS.values()])
    assert_same(results[0], results[1])


def test_eager_calls_of_the_model_itself_stay_torchs(model: Any) -> None:
    module = noisy()
    torch.manual_seed(3)
    expected = module(X)
    torch.manual_seed(3)
    WAYS["autograd"](*model)
    assert_same(functional_call(module, dict(module.named_parameters()), (X,)), expected)


def test_the_value_of_noise_is_the_same_in_training_and_inference() -> None:
    state, fn = compiled(noise, X)
    _, plain = fn(state, X)
    _, trained = fn(state, X.clone().requires_grad_())
    assert_same(trained.detach(), plain)
