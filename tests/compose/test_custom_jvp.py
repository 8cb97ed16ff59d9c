"""Custom Functions with rules of their own for forward mode and vmap, and functions that use transforms inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from tests.compose.case import Case, Function, compiled_call, eager_call, numbers, stateless
from tests.compose.custom import ForwardSurrogate
from tests.compose.custom_forward import OwnEverything, OwnVmap, counted
from tests.compose.quiet import QUIET
from tests.compose.transform import Meets
from tests.compose.transforms import TRANSFORMS, transform_named
from tests.compose.trees import scalar, stacked, waves
from tests.helpers import assert_same, compiled

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def close(actual: Any, expected: Any) -> None:
    """Both trees are the same but for rounding."""
    assert_same(actual, expected, **CLOSE)


def with_rule(x: torch.Tensor) -> torch.Tensor:
    return ForwardSurrogate.apply(x.sin()) * x


def rule_of_a_rule(x: torch.Tensor) -> torch.Tensor:
    return ForwardSurrogate.apply(OwnEverything.apply(x) + ForwardSurrogate.apply(x).cos())


def own_everything(x: torch.Tensor) -> torch.Tensor:
    return OwnEverything.apply(x * 2) * x.exp()


def own_vmap(x: torch.Tensor) -> torch.Tensor:
    return OwnVmap.apply(x * 2) * x


def gradient_inside(x: torch.Tensor) -> torch.Tensor:
    return grad(lambda y: (y**4).sum())(x) * x.sin()


def batched_gradient_inside(x: torch.Tensor) -> torch.Tensor:
    return vmap(grad(lambda y: y.sin() * y))(x) + x**2


def tangent_inside(x: torch.Tensor) -> torch.Tensor:
    return jvp(lambda y: y**3 * x, (x.sin(),), (x,))[1]


def hessian_inside(x: torch.Tensor) -> torch.Tensor:
    return hessian(lambda y: (y**3).sum() * y[0])(x) @ x


FUNCTIONS: dict[str, Function] = {
    one.__name__: one
    for one in (with_rule, rule_of_a_rule, own_everything, gradient_inside, batched_gradient_inside, tangent_inside,
                hessian_inside)
}  # fmt: skip
ORDERS = [one.name for one in TRANSFORMS if one.meets is not Meets.DEEP]
FEW = ["grad", "jvp", "jacrev", "vmap", "per-sample gradients", "grad of grad", "hessian", "jacrev of jacfwd",
       "hvp reverse over forward", "double backward", "vmap of jvp of grad"]  # fmt: skip
PAIRS = [(name, order) for name in FUNCTIONS for order in (ORDERS if name in ("with_rule", "gradient_inside") else FEW)]


def case_of(function: Function) -> Case:
    """A case of the function at three numbers."""
    return Case(function.__name__, lambda: function, lambda: (numbers(3),))


def check(case: Case, name: str) -> None:
    """The transform of the compiled case is refused as eager refuses it, or equals eager's with nothing run eager."""
    args, transform = case.inputs(), transform_named(name)
    try:
        expected = transform.apply(eager_call(case), args)
    except (RuntimeError, NotImplementedError) as refusal:
        pytest.skip(f"eager refuses: {str(refusal)[:80]}")
    call, fn = compiled_call(case)
    assert_same(transform.apply(call, args), expected, rtol=1e-8, atol=1e-10, what=name)
    assert fn.cache_info().eager_calls == 0


@pytest.mark.parametrize(("name", "order"), PAIRS)
def test_every_transform(name: str, order: str) -> None:
    check(case_of(FUNCTIONS[name]), order)


# Where a graph is batched, the forward is what is batched: a rule that disagrees with it would show (docs).
@pytest.mark.parametrize("order", ["call", "grad", "double backward"])
def test_its_own_rule_for_vmap(order: str) -> None:
    check(case_of(own_vmap), order)


def test_linearize_uses_the_rule() -> None:
    x = numbers(3)
    for function in (with_rule, own_everything):
        state, fn = compiled(function, (x,))
        out, push = linearize(stateless(fn, state), x)
        close((out, push(waves(x))), jvp(function, (x,), (waves(x),)))


def test_inductor_keeps_the_rule() -> None:
    x = numbers(3)
    state, fn = compiled(with_rule, (x,), backend="inductor")
    call = stateless(fn, state)
    close(jvp(call, (x,), (waves(x),)), jvp(with_rule, (x,), (waves(x),)))
    close(hessian(lambda x: call(x).sum())(x), hessian(lambda x: with_rule(x).sum())(x))


def model_calls() -> tuple[Function, Function, Any]:
    """The module with its buffers as new, compiled and eager, as functions of parameters and input; and these."""
    model, x = counted(), numbers(4, 2)
    state, fn = compiled(model, (x,))

    def twin(params: Any, x: torch.Tensor) -> torch.Tensor:
        fresh = {name: one.clone() for name, one in model.named_buffers()}
        return functional_call(model, {**params, **fresh}, (x,))

    params = {name: one.detach().clone() for name, one in fn.params.items()}
    return stateless(fn, state), twin, (params, x)


OVER_MODEL: dict[str, Callable[[Function, Any], Any]] = {
    "grad": lambda f, args: grad(scalar(f))(*args),
    "vjp": lambda f, args: vjp(f, *args)[1](waves(args[1]).sum(1, keepdim=True).expand(4, 3)),
    "jvp": lambda f, args: jvp(f, args, waves(args)),
    "jacfwd": lambda f, args: jacfwd(f)(*args),
    "jacrev": lambda f, args: jacrev(f, argnums=1)(*args),
}


@pytest.mark.parametrize("order", OVER_MODEL)
def test_a_module_with_a_rule_batch_norm_and_a_count(order: str) -> None:
    call, twin, args = model_calls()
    close(OVER_MODEL[order](call, args), OVER_MODEL[order](twin, args))


def test_both_hessians_of_the_module_agree() -> None:
    call, _, (params, x) = model_calls()
    value: Function = lambda x: scalar(call)(params, x)  # noqa: E731
    close(hessian(value)(x), jacrev(jacrev(value))(x))


def test_an_ensemble_of_the_module() -> None:
    call, twin, (params, x) = model_calls()
    members = stacked(params)
    rows = [{name: own[i] for name, own in members.items()} for i in range(3)]
    close(vmap(call, (0, None))(members, x), torch.stack([twin(row, x) for row in rows]))


def test_training_by_plain_autograd() -> None:
    model = counted()
    twin = copy.deepcopy(model)
    state, fn = compiled(model, (numbers(4, 2),))
    optimisers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (model, twin)]
    for step in range(4):
        x = numbers(4, 2, seed=step)
        state, out = fn(state, fn.params, x)
        for loss, optimiser in zip((out.square().mean(), twin(x).square().mean()), optimisers, strict=True):
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    close(dict(model.named_parameters()), dict(twin.named_parameters()))
    close(dict(state.buffers[fn.owner]), dict(twin.named_buffers()))
    assert state.buffers[fn.owner]["count"] == 4
    assert not model.count
    assert fn.cache_info().eager_calls == 0
