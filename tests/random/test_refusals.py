"""What cannot draw from a key is refused in words, and `rng="torch"` still takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scoped_fn as sf
from tests.helpers import process_unchanged
from tests.random.models import compiled

X = torch.rand(3, 2, 4) + 1
GENERATOR = torch.Generator().manual_seed(3)


class OwnForward(torch.autograd.Function):
    """A custom rule whose forward draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class OwnBackward(torch.autograd.Function):
    """A custom rule whose backward draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand_like(grad)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a generator": (lambda x: x + torch.randn(4, generator=GENERATOR), "generator"),
    "a generator of an in-place draw": (lambda x: (x * 1).normal_(generator=GENERATOR), "generator"),
    "poisson": (torch.poisson, "poisson"),
    "binomial": (lambda x: torch.binomial(x.round(), x * 0 + 0.5), "binomial"),
    "gamma": (lambda x: torch._standard_gamma(x), "gamma"),
}


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_words(name: str, capture: str) -> None:
    function, word = REFUSED[name]
    with process_unchanged(), pytest.raises(sf.RandomOpError, match=rf"(?is)Expected .*{word}.*rng='torch'"):
        compiled(function, X, capture=capture)


@pytest.mark.parametrize("name", ["poisson", "binomial", "a generator"])
def test_the_text_says_the_line_of_the_model(name: str) -> None:
    with pytest.raises(sf.RandomOpError, match=r"(?s)got .*test_refusals\.py:\d+"):
        compiled(REFUSED[name][0] if name != "poisson" else (lambda x: torch.poisson(x)), X)


@pytest.mark.parametrize("rule", [OwnForward, OwnBackward])
def test_a_custom_rule_that_draws_is_refused_in_training(rule: Any) -> None:
    def train() -> None:
        state, fn = compiled(rule.apply, X.clone().requires_grad_())
        fn(state, X.clone().requires_grad_())[1].sum().backward()

    with pytest.raises(sf.RandomOpError, match=r"(?s)Expected .*, got .*rng='torch'"):
        train()


@pytest.mark.parametrize("name", ["poisson", "binomial"])
def test_torchs_generators_take_it(name: str) -> None:
    function = REFUSED[name][0]
    state, fn = compiled(function, X, rng="torch")
    call = (lambda: fn(state, fn.params, X)) if isinstance(function, nn.Module) else (lambda: fn(state, X))
    torch.manual_seed(7)
    first = call()[1]
    torch.manual_seed(7)
    second = call()[1]
    one, other = (out[0] if isinstance(out, tuple) else out for out in (first, second))
    assert torch.equal(one, other)


@pytest.mark.parametrize("rng", [None, "numpy", "jax", 0, True, "Key"])
def test_a_source_that_is_none_is_refused(rng: Any) -> None:
    for make in (
        lambda: compiled(torch.sin, X, rng=rng),
        lambda: sf.Engine(nn.Linear(4, 4), (X,), backend="eager", rng=rng),
        lambda: sf.stages.capture(sf.init_state(), torch.sin, (X,), rng=rng),
    ):
        with pytest.raises(sf.SpecError, match=r"(?s)Expected rng.*'key'.*'torch'.*, got"):
            make()


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers_is_not_lost_with_torchs_generators(kind: type[nn.Module], capture: str) -> None:
    with pytest.raises(sf.RandomOpError, match=r"Expected .*recurrent.*, got .*rng='key'"):
        compiled(kind(4, 3, num_layers=2, dropout=0.5).train(), X, rng="torch", capture=capture)


def test_torchs_generators_leave_the_key() -> None:
    state, fn = compiled(lambda x: torch.rand_like(x), X, rng="torch")
    stream = torch.get_rng_state()
    after, _ = fn(state, X)
    assert after.key is state.key
    assert not torch.equal(stream, torch.get_rng_state())


@pytest.mark.parametrize("words", [torch.zeros(2), torch.zeros(3, dtype=torch.uint32), None], ids=repr)
def test_a_state_whose_key_is_none_is_refused_at_the_call(words: Any) -> None:
    state, fn = compiled(lambda x: torch.rand_like(x), X)
    with pytest.raises((ValueError, TypeError), match=r"(?s)Expected .*key.*, got"):
        fn(replace(state, key=words), X)


NO_ARGUMENTS: dict[str, tuple[Callable[..., Any], str]] = {
    "uniform_": (lambda x: (x * 1).uniform_(2, 1), r"bounds in order, got \(2(.0)?, 1(.0)?\)"),
    "bernoulli_": (lambda x: (x * 1).bernoulli_(2.0), "a probability from 0 to 1, got 2.0"),
    "multinomial of none": (lambda x: torch.multinomial(x[0], 0), "a number of samples above 0, got 0"),
    "multinomial of integers": (lambda x: torch.multinomial(x[0].long(), 1), "of a floating point dtype, got .*int64"),
    "randint": (
        lambda x: x + torch.randint(0, 2**40, (4,), dtype=torch.int32),
        r"bounds within torch.int32, got \(0, 1",
    ),
    "randperm": (
        lambda x: x.sum() + torch.randperm(300, dtype=torch.uint8),
        "as many numbers as torch.uint8 tells .*, got 300",
    ),
    "randint bool": (
        lambda x: x * torch.randint(0, 5, (4,), dtype=torch.bool),
        r"bounds within torch.bool, got \(0, 5",
    ),
    "randint float16": (
        lambda x: x * torch.randint(0, 2**20, (4,), dtype=torch.float16),
        r"bounds within torch.float16, got \(0, 1",
    ),
    "randint_like": (lambda x: torch.randint_like(x, 3, 3), r"a bound above the least number, got \(3, 3\)"),
}


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize("name", NO_ARGUMENTS)
def test_what_torch_refuses_is_refused(name: str, capture: str) -> None:
    function, words = NO_ARGUMENTS[name]
    with pytest.raises((RuntimeError, NotImplementedError)):
        function(X)
    with pytest.raises(ValueError, match=rf"(?s)Expected .*{words}.*change the model"):
        compiled(function, X, capture=capture)
