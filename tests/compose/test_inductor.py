"""Transforms over code that Inductor compiled: small networks, few combinations, nothing eager."""

from __future__ import annotations

import functools

import pytest
import torch

import scoped_fn as sf
from tests.compose.case import Arguments, Case, Function, compiled_call, eager_call, over_differentiable
from tests.compose.quiet import QUIET
from tests.compose.transforms import case_named, transform_named
from tests.helpers import assert_same, process_unchanged

pytestmark = QUIET

NETWORK = ["grad", "per-sample gradients", "jvp", "hessian", "jacrev", "double backward", "ensemble",
           "ensemble gradients", "grad of vmap"]  # fmt: skip
COMBINATIONS = [
    *(("small mlp", name) for name in NETWORK),
    ("float32 weights", "grad of grad"),
    ("surrogate", "grad of grad"),
    ("outputs", "vmap of the last dimension"),
]


@functools.cache
def subject(case: Case) -> tuple[Function, Arguments, sf.CompiledFn]:
    """The case compiled by Inductor, once for all its transforms."""
    call, fn = compiled_call(case, "inductor")
    return *over_differentiable(case, call), fn


@pytest.mark.parametrize(("case", "name"), COMBINATIONS)
def test_it_equals_eager_and_stays_compiled(case: str, name: str) -> None:
    chosen, transform = case_named(case), transform_named(name)
    expected = transform.apply(*over_differentiable(chosen, eager_call(chosen)))
    function, args, fn = subject(chosen)
    with process_unchanged():
        actual = transform.apply(function, args)
    assert_same(actual, expected, rtol=chosen.rtol, atol=chosen.rtol / 10, what=name)
    first = fn.cache_info()
    assert first.eager_calls == 0
    assert_same(transform.apply(function, args), actual, rtol=1e-10, atol=1e-10, what=f"{name}, again")
    again = fn.cache_info()
    assert (again.captures, again.compiled_graphs, again.eager_calls) == (first.captures, first.compiled_graphs, 0)


def test_a_float32_training_step_with_a_gradient_penalty() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x = torch.randn(5, 3, requires_grad=True)

    def penalised(function: Function) -> tuple[torch.Tensor, ...]:
        value = function(x).square().sum()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return torch.autograd.grad(value + (slope.norm() - 1) ** 2, list(model.parameters()))

    state, fn = sf.compile(sf.init_state(), model, (x,))
    actual = penalised(lambda inputs: fn(state, fn.params, inputs)[1])
    assert_same(actual, penalised(model), rtol=1e-4, atol=1e-5)
    assert fn.cache_info().eager_calls == 0
