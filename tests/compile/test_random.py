"""Random operations need a source of randomness; with torch's generator they draw eager's stream."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf
from tests.cases.casekit import weighted_loss
from tests.helpers import assert_same, compiled, fresh, process_unchanged

X = torch.ones(8, 4)

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(8, 4),
    "randint": lambda x: x + torch.randint(0, 10, (8, 4)),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "randperm": lambda x: x.cumsum(0)[torch.randperm(8)],
    "normal_": lambda x: x + torch.empty(8, 4).normal_(),
    "multinomial": lambda x: x.cumsum(0)[torch.multinomial(torch.ones(8), 3)],
    "several": lambda x: F.dropout(x, 0.2, True) + torch.randn(8, 4) * torch.rand(4),
}


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize("name", DRAWS)
def test_a_random_operation_draws_from_the_key_by_default(name: str, capture: str) -> None:
    with process_unchanged():
        state, fn = compiled(DRAWS[name], (X,), capture=capture)
        after, first = fn(state, X)
        again, same = fn(state, X)
        other = fn(after, X)[1]
    assert_same(first, same)
    assert sf.tree_equal(after, again)
    assert not torch.equal(state.key, after.key)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_what_cannot_draw_from_a_key_is_refused(capture: str) -> None:
    with process_unchanged(), pytest.raises(sf.RandomOpError, match=r"Expected .*, got aten\.poisson.*rng="):
        compiled(lambda x: torch.poisson(x), (X,), capture=capture)


@pytest.mark.parametrize("name", DRAWS)
def test_the_stream_is_that_of_eager(name: str) -> None:
    state, fn = compiled(DRAWS[name], (X,), rng="torch")
    torch.manual_seed(7)
    ours = [fn(state, X)[1] for _ in range(3)]
    torch.manual_seed(7)
    assert_same(ours, [DRAWS[name](X) for _ in range(3)])


@pytest.mark.parametrize("name", ["dropout", "rand_like", "several"])
def test_the_stream_is_that_of_eager_under_inductor(name: str) -> None:
    state, fn = compiled(DRAWS[name], (X,), rng="torch", backend="inductor")
    torch.manual_seed(7)
    ours = [fn(state, X)[1] for _ in range(3)]
    torch.manual_seed(7)
    assert_same(ours, [DRAWS[name](X) for _ in range(3)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gradients_use_the_mask_of_the_forward(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3), nn.Dropout(0.3))
    twin = copy.deepcopy(model)
    state, fn = compiled(model, (X,), rng="torch", backend=backend)
    x, other = fresh(X).requires_grad_(), fresh(X).requires_grad_()
    torch.manual_seed(7)
    _, out = fn(state, fn.params, x)
    weighted_loss(out).backward()
    torch.manual_seed(7)
    expected = twin(other)
    weighted_loss(expected).backward()
    assert_same(out, expected, rtol=1e-5, atol=1e-6)
    assert_same(x.grad, other.grad, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_draw_between_forward_and_backward_does_not_move_the_mask(backend: str) -> None:
    state, fn = compiled(lambda x: F.dropout(x, 0.5, True), (fresh(X).requires_grad_(),), rng="torch", backend=backend)
    x = fresh(X).requires_grad_()
    _, out = fn(state, x)
    torch.manual_seed(99)
    torch.rand(5)
    out.sum().backward()
    assert_same(x.grad, out.detach())


def test_the_backward_draws_nothing() -> None:
    state, fn = compiled(lambda x: F.dropout(x, 0.5, True), (fresh(X).requires_grad_(),), rng="torch")
    _, out = fn(state, fresh(X).requires_grad_())
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiling_draws_nothing(backend: str) -> None:
    with process_unchanged():
        compiled(lambda x: F.dropout(x, 0.5, True), (fresh(X).requires_grad_(),), rng="torch", backend=backend)


def test_a_checkpointed_region_recomputes_with_its_own_mask() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    model = Region()
    twin = copy.deepcopy(model)
    try:
        state, fn = compiled(model, (X,), rng="torch")
    except sf.CaptureError as error:
        assert "checkpoint" in str(error).lower()
        return
    torch.manual_seed(7)
    _, out = fn(state, fn.params, X)
    torch.rand(3)
    weighted_loss(out).backward()
    torch.manual_seed(7)
    weighted_loss(twin(X)).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_dropout_in_evaluation_is_no_random_operation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    state, fn = compiled(model, (X,))
    assert_same(fn(state, fn.params, X)[1], model(X))


def test_dropout_with_probability_zero_gives_the_input() -> None:
    state, fn = compiled(lambda x: F.dropout(x, 0.0, True) * 2, (X,), rng="torch")
    assert_same(fn(state, X)[1], X * 2)


def test_an_operation_with_its_own_generator_is_refused() -> None:
    generator = torch.Generator().manual_seed(3)
    with pytest.raises(sf.CaptureError, match="(?i)generator|random"):
        compiled(lambda x: x + torch.randn(4, generator=generator), (X,), rng="torch")


def test_value_and_grad_draws_eagers_stream() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * x, 0.5, True).sum()

    x = torch.arange(1.0, 9.0)
    state, fn = compiled(loss, (x,), rng="torch")
    torch.manual_seed(7)
    _, (value, grads) = sf.value_and_grad(fn)(state, x)
    torch.manual_seed(7)
    leaf = x.clone().requires_grad_()
    expected = loss(leaf)
    expected.backward()
    assert_same(value, expected.detach())
    assert_same(grads, leaf.grad)


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_a_number_drawn_outside_torch_is_never_baked_in(draw: Callable[[], float], capture: str) -> None:
    streams = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(sf.CaptureError, match="Expected"):
        compiled(lambda x: x * float(draw()), (X,), rng="torch", capture=capture)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == streams
