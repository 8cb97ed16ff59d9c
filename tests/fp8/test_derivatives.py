"""Forward mode and derivatives of derivatives are straight-through: as if quantization had the derivative one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import scoped_fn as sf
from scoped_fn.kernels import dequantize
from tests.compose.quiet import QUIET
from tests.fp8.networks import Loss, mlp
from tests.fp8.reference import E4M3, E5M2, STATELESS, quantize
from tests.fp8.scoped import KINDS, assert_norm_close, scoped
from tests.helpers import assert_same

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
# Scales of the whole tensor: its transposed codes are the same numbers. Blocks along the other side are not.
PER_TENSOR = ["delayed", "current"]


def rounded(kind: str, role: str, x: Tensor) -> Tensor:
    """x as its FP8 codes give it back; delayed scaling has the scale 1 in its first step."""
    if kind == "delayed":
        return dequantize(quantize(x, torch.ones(()), E5M2 if role == "grad_output" else E4M3))
    return dequantize(STATELESS[kind](role, x))


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w, b)


def operands(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in ((5, 6), (4, 6), (4,)))


def stateless(kind: str, function: Callable[..., Tensor] = linear) -> Callable[..., Tensor]:
    run = scoped(function, operands(), kind)
    assert len(run.fn.sites) == 1
    return lambda *args: run.fn(run.state, *args)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tangent_is_that_of_the_rounded_product(kind: str) -> None:
    call, (x, w, b), (tx, tw, tb) = stateless(kind), operands(), operands(1)
    out, tangent = jvp(call, (x, w, b), (tx, tw, tb))
    assert_same(out, call(x, w, b))
    expected = tx @ rounded(kind, "weight", w).T + rounded(kind, "input", x) @ tw.T + tb
    assert_same(tangent, expected, **CLOSE)


def test_a_tangent_of_one_operand() -> None:
    call, (x, w, b), (tx, tw, _) = stateless("current"), operands(), operands(1)
    _, of_x = jvp(lambda x: call(x, w, b), (x,), (tx,))
    assert_same(of_x, tx @ rounded("current", "weight", w).T, **CLOSE)
    _, of_w = jvp(lambda w: call(x, w, b), (w,), (tw,))
    assert_same(of_w, rounded("current", "input", x) @ tw.T, **CLOSE)


def test_sf_jvp_carries_the_state() -> None:
    run = scoped(linear, operands())
    state, (out, tangent) = sf.jvp(run.fn)(run.state, operands(), operands(1))
    assert_same((out, tangent), jvp(lambda *args: run.fn(run.state, *args)[1], operands(), operands(1)))
    assert sf.state.tree_structure(state) == sf.state.tree_structure(run.state)


def test_sf_vjp_pulls_back_the_gradients_of_training() -> None:
    run = scoped(linear, operands())
    _, (out, pull) = sf.vjp(run.fn)(run.state, *operands())
    expected = grad(lambda *args: run.fn(run.state, *args)[1].sum(), argnums=(0, 1, 2))(*operands())
    assert_same(pull(torch.ones_like(out)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_jacobians_by_both_modes_agree(kind: str) -> None:
    call, args = stateless(kind), operands()
    forward, reverse = jacfwd(call, argnums=(0, 1, 2))(*args), jacrev(call, argnums=(0, 1, 2))(*args)
    for one, other in zip(forward, reverse, strict=True):  # the rows that jacrev pulls back are FP8 numbers
        assert_norm_close(one, other, 1e-5 if kind in PER_TENSOR else 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hessian_of_a_linear_layer(kind: str) -> None:
    x, w, b = operands()
    energy = stateless(kind, lambda x, w, b: linear(x, w, b).square().sum() / 2)
    actual = hessian(lambda w: energy(x, w, b))(w)
    codes = rounded(kind, "input", x)
    expected = torch.einsum("ij,kl->ikjl", torch.eye(4), codes.T @ codes)
    assert actual.shape == (4, 6, 4, 6)
    assert_norm_close(actual, expected, 1e-5 if kind in PER_TENSOR else 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_a_gradient(kind: str) -> None:
    x, w, b = operands()
    energy = stateless(kind, lambda x, w, b: linear(x, w, b).square().sum() / 2)
    slope = grad(lambda w: energy(x, w, b))
    actual = grad(lambda w: slope(w).square().sum())(w)
    codes = rounded(kind, "input", x)
    assert_norm_close(actual, 2 * slope(w) @ (codes.T @ codes), 0.1)


def test_a_gradient_of_a_gradient_by_plain_autograd_is_the_same() -> None:
    x, w, b = operands()
    energy = stateless("current", lambda x, w, b: linear(x, w, b).square().sum() / 2)
    leaf = w.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy(x, leaf, b), leaf, create_graph=True)
    (actual,) = torch.autograd.grad(slope.square().sum(), leaf)
    inner = grad(lambda w: energy(x, w, b))
    assert_same(actual, grad(lambda w: inner(w).square().sum())(w), rtol=1e-5, atol=1e-5)


def test_derivatives_of_a_network_are_those_of_eager_but_for_rounding() -> None:
    model, (x, y) = Loss(mlp()), (torch.randn(6, 8), torch.randn(6, 4))
    run = scoped(model, (x, y), "current")
    ours = lambda params: run.fn(run.state, params, x, y)[1]  # noqa: E731
    theirs = lambda params: torch.func.functional_call(model, params, (x, y))  # noqa: E731
    direction = {name: torch.randn_like(own) for name, own in run.params.items()}
    for order in (lambda f: f, grad):
        one, other = (jvp(order(f), (run.params,), (direction,))[1] for f in (ours, theirs))
        for mine, its in zip(*(torch.utils._pytree.tree_leaves(tree) for tree in (one, other)), strict=True):
            assert_norm_close(mine, its, 0.35)
    assert run.fn.cache_info().eager_calls == 0


def test_per_sample_tangents_equal_the_loop() -> None:
    call, (x, w, b), (tx, _, _) = stateless("current"), operands(), operands(1)
    push = lambda row, t: jvp(lambda row: call(row, w, b), (row,), (t,))[1]  # noqa: E731
    rows, tangents = x[:, None].expand(5, 5, 6), tx[:, None].expand(5, 5, 6)
    expected = torch.stack([push(row, t) for row, t in zip(rows, tangents, strict=True)])
    assert_same(vmap(push)(rows, tangents), expected, **CLOSE)
