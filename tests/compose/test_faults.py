"""Faults that were found by trying to break transforms over compiled functions, each kept as a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf
from tests.compose.custom import Surrogate
from tests.compose.quiet import QUIET
from tests.helpers import compiled

pytestmark = QUIET


def over(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[Callable[..., Any], Any]:
    """The compiled function without its state, and itself."""
    state, fn = compiled(function, inputs, **options)
    return lambda *args: fn(state, *args)[1], fn


def numbers(*shape: int) -> Tensor:
    """Numbers from 0.1 upwards, float64."""
    return torch.linspace(0.1, 1.3, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def test_a_pull_can_be_differentiated_after_its_level_has_ended() -> None:
    x, c = numbers(3), numbers(3) * 2
    ours = over(torch.sin, x)[0]
    for pull, expected in [(vjp(ours, x)[1], vjp(torch.sin, x)[1])]:
        for of in (lambda p: grad(lambda c: (p(c)[0] ** 2).sum())(c), lambda p: jacrev(p)(c)[0],
                   lambda p: jvp(p, (c,), (c,))[1][0]):  # fmt: skip
            torch.testing.assert_close(of(pull), of(expected))


def test_the_rule_of_a_function_holds_in_a_transform_inside_what_is_compiled() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return ((Surrogate.apply(w) * x - 1) ** 2).sum()  # applied to what is differentiated

    w, x = numbers(2), numbers(2) * 3
    expected = grad(loss)(w, x)
    torch.testing.assert_close(over(grad(loss), w, x)[0](w, x), expected)
    state, fn = compiled(loss, (w, x))
    outer, step = compiled(lambda state, w, x: sf.grad(fn)(state, w, x)[1], (state, w, x))
    torch.testing.assert_close(step(outer, state, w, x)[1], expected)


def test_higher_derivatives_of_a_function_that_draws_are_refused() -> None:
    x = numbers(4) + 1
    ours, fn = over(lambda x: (F.dropout(x, 0.5, True) ** 2).sum(), x, rng="torch")
    grad(ours)(x)
    vmap(grad(ours), randomness="different")(torch.stack([x, x]))
    jacrev(lambda x: ours(x)[None])(x)
    for once in (lambda x: vmap(ours, randomness="different")(torch.stack([x, x])).sum(),
                 lambda x: jvp(ours, (x,), (x,))[1]):  # fmt: skip
        slope = grad(once)(x)  # one draw for forward and backward
        assert ((slope == 0) | (slope.abs() > 1)).all()
    for of in (grad(lambda x: grad(ours)(x).sum()), lambda x: jvp(grad(ours), (x,), (x,))):
        with pytest.raises(sf.RandomOpError, match="Expected a first derivative of .*Compile the function that takes"):
            of(x)
    assert fn.cache_info().eager_calls == 0
    torch.manual_seed(0)
    whole = over(grad(lambda x: grad(lambda x: (F.dropout(x, 0.5, True) ** 2).sum())(x).sum()), x, rng="torch")[0]
    assert set(whole(x).tolist()) <= {0.0, 8.0}


def test_a_function_assembled_by_hand_is_refused_inside_a_compile() -> None:
    x = numbers(2)
    state, captured = sf.stages.capture(sf.init_state(), F.relu, (x,))
    state, inference = sf.stages.lower_inference(state, captured)
    state, code = sf.stages.compile_inference(state, inference)
    state, fn = sf.stages.assemble_inference(state, captured, inference, code)
    with pytest.raises(sf.SpecError, match="without captured passes"):
        torch.fx.experimental.proxy_tensor.make_fx(lambda x: fn(state, x)[1], tracing_mode="fake")(x)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_a_masked_row_of_attention_has_finite_derivatives(dtype: torch.dtype) -> None:
    mask = torch.ones(4, 4, dtype=torch.bool).index_fill(0, torch.tensor(1), False)
    if dtype is not torch.bool:
        mask = torch.zeros(4, 4, dtype=dtype).masked_fill(~mask, -torch.inf)

    def function(q: Tensor) -> Tensor:
        return (F.scaled_dot_product_attention(q, q, q, mask) ** 2).sum()

    q = numbers(2, 4, 3)
    ours = over(function, q)[0]
    torch.testing.assert_close(
        vmap(grad(ours))(q[:, None].expand(2, 2, 4, 3)), vmap(grad(function))(q[:, None].expand(2, 2, 4, 3))
    )
    assert grad(lambda q: grad(ours)(q).sum())(q).isfinite().all()


def test_attention_under_autocast_has_the_dtype_of_the_plain_call() -> None:
    q = numbers(1, 2, 4, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        ours = over(lambda q: F.scaled_dot_product_attention(q, q, q), q)[0]
        assert ours(q).dtype is torch.bfloat16
        assert jvp(ours, (q,), (q,))[0].dtype is torch.bfloat16
        assert vmap(ours)(q[None]).dtype is torch.bfloat16


def test_a_fourth_order_of_forward_in_reverse_twice() -> None:
    def order(f: Callable[..., Any]) -> Callable[..., Any]:
        def forward(g: Any) -> Any:
            return lambda x: jvp(g, (x,), (torch.ones_like(x),))[1]

        def reverse(g: Any) -> Any:
            return lambda x: grad(lambda x: (g(x) ** 2).sum())(x)

        return reverse(reverse(forward(forward(f))))

    x = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(order(over(lambda x: x**3, x)[0])(x), torch.full_like(x, 10368.0))


def test_a_tangent_that_comes_in_by_a_closure_reaches_the_result() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return a.sin() * b.exp()

    a, b, c = numbers(3, 3)
    ours = over(function, a, b)[0]
    for of in (
        lambda f: jvp(lambda a: vjp(lambda b: f(a, b), b)[1](c)[0], (a,), (c,)),
        lambda f: jvp(lambda a: grad(lambda b: grad(lambda b: f(a, b).sum())(b).sum())(b), (a,), (c,)),
        lambda f: grad(lambda t: linearize(f, t, b)[1](c, c).sum())(a),
    ):
        torch.testing.assert_close(of(ours), of(function))


def test_second_derivatives_of_an_older_function_with_a_rule_for_forward_mode() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 3 * gradient * ctx.saved_tensors[0] ** 2

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return tangent

    x = numbers(3).requires_grad_()
    ours, fn = over(lambda x: Cube.apply(x).sum(), x)
    (first,) = torch.autograd.grad(ours(x), x, create_graph=True)
    with pytest.warns(UserWarning, match="a part that runs eager"):
        (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach())
    assert fn.cache_info().eager_calls > 0


def test_checkpoint_regions_under_a_gradient_of_another_argument() -> None:
    x = numbers(3)
    ours, fn = over(lambda x: checkpoint(lambda z: z.tanh() * z.exp(), x, use_reentrant=False).sum(), x)
    expected = grad(lambda x: (x.tanh() * x.exp()).sum())
    torch.testing.assert_close(grad(ours)(x), expected(x))
    torch.testing.assert_close(vmap(grad(ours))(torch.stack([x, x])), vmap(expected)(torch.stack([x, x])))
    assert fn.cache_info().eager_calls == 0


def test_arguments_are_checked_where_a_call_is_traced() -> None:
    state, fn = compiled(torch.nn.Linear(3, 3), (torch.ones(2, 3),))
    weight = {"weight": torch.zeros(3, 3)}
    for params in (weight, {**fn.params, "more": torch.zeros(3)}):
        with pytest.raises((sf.SpecError, sf.CaptureError)):
            sf.compile(state, lambda x, params=params: fn(state, params, x)[1], (torch.ones(2, 3),), backend="eager")
    with pytest.raises((sf.OwnershipError, sf.CaptureError)):
        sf.compile(state, lambda x: fn(sf.init_state(), fn.params, x)[1], (torch.ones(2, 3),), backend="eager")


def test_multi_head_attention_has_tangents_and_second_derivatives() -> None:
    torch.manual_seed(0)
    module = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
    state, fn = compiled(module, (numbers(2, 3, 4),))
    params = {name: p.detach() for name, p in fn.params.items()}

    def loss(x: Tensor) -> Tensor:
        return (fn(state, params, x)[1] ** 2).sum()

    x = numbers(2, 3, 4)
    slope, bend = jvp(grad(loss), (x,), (x,))
    step = 1e-5
    torch.testing.assert_close(
        bend, (grad(loss)(x + step * x) - grad(loss)(x - step * x)) / (2 * step), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(vmap(grad(loss))(torch.stack([x, x]))[0], slope)
    assert fn.cache_info().eager_calls == 0


def test_vmap_of_a_stateful_function_can_be_compiled() -> None:
    state, fn = compiled(lambda x: x.sin().sum(), (numbers(3),))
    outer, mapped = compiled(lambda state, x: sf.vmap(sf.grad(fn))(state, x)[1], (state, numbers(4, 3)))
    torch.testing.assert_close(mapped(outer, state, numbers(4, 3))[1], numbers(4, 3).cos())
