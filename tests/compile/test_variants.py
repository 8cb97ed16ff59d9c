"""New shapes, dtypes, scalars and modes compile a variant, once; a variant never answers for another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import assert_same, compiled


def test_cache_info_counts_each_kind_of_work() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    state, fn = compiled(model, (x,))
    assert fn.cache_info().captures == 1
    assert fn.cache_info().compiled_graphs == 2, "a forward and a backward"
    assert fn.cache_info().compiled_calls == 0
    _, out = fn(state, fn.params, x)
    assert fn.cache_info().compiled_calls == 1
    out.sum().backward()
    assert fn.cache_info().compiled_calls == 2
    assert fn.cache_info()._fields == ("captures", "compiled_graphs", "compiled_calls", "eager_calls")
    assert fn.cache_info().eager_calls == 0


def test_inference_compiles_one_graph() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.no_grad():
        state, fn = compiled(model, (x,))
        fn(state, fn.params, x)
    assert fn.cache_info() == (1, 1, 1, 0)
    assert fn.backward_graph is None
    assert fn.joint_graph is None


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_new_shape_is_one_new_variant_once(backend: str) -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        state, fn = compiled(model, (torch.randn(4, 3),), backend=backend)
        for rows in (4, 7, 4, 7, 1, 7, 4):
            x = torch.randn(rows, 3)
            assert_same(fn(state, fn.params, x)[1], model(x), rtol=1e-6, atol=1e-6)
    assert fn.cache_info().captures == 3
    assert fn.cache_info().compiled_graphs == 3
    assert fn.cache_info().compiled_calls == 7


def test_a_scalar_is_never_stale() -> None:
    x = torch.tensor([2.0, 3.0])
    state, fn = compiled(lambda x, n: x * n, (x, 2))
    for n in (2, 3, 2, 0, -1, 3):
        assert_same(fn(state, x, n)[1], x * n)
    assert fn.cache_info().captures == 4


def test_one_and_one_point_zero_and_true_are_three_variants() -> None:
    x = torch.tensor([2, 3])
    state, fn = compiled(lambda x, n: x * n, (x, 1))
    for n in (1, 1.0, True, 1, 1.0, True):
        assert_same(fn(state, x, n)[1], x * n)
    assert fn.cache_info().captures == 3


def test_zero_and_minus_zero_are_told_apart() -> None:
    x = torch.tensor([1.0])
    state, fn = compiled(lambda x, n: 1 / (x * n), (x, 0.0))
    for n in (0.0, -0.0, 0.0):
        assert_same(fn(state, x, n)[1], 1 / (x * n))


def test_nan_is_a_variant_of_its_own_and_only_one() -> None:
    x = torch.tensor([1.0])
    state, fn = compiled(lambda x, n: x * n, (x, 2.0))
    for _ in range(3):
        assert_same(fn(state, x, float("nan"))[1], x * float("nan"))
    assert fn.cache_info().captures == 2


def test_a_string_is_never_stale() -> None:
    x = torch.tensor([2.0, 4.0])
    state, fn = compiled(lambda x, how: getattr(x, how)(), (x, "sum"))
    for how in ("sum", "mean", "sum", "prod"):
        assert_same(fn(state, x, how)[1], getattr(x, how)())
    assert fn.cache_info().captures == 3


def test_none_against_a_tensor_is_a_variant() -> None:
    x = torch.tensor([2.0, 4.0])
    state, fn = compiled(lambda x, mask=None: x if mask is None else x * mask, (x,))
    assert_same(fn(state, x)[1], x)
    assert_same(fn(state, x, torch.ones(2) * 3)[1], x * 3)
    assert_same(fn(state, x, mask=torch.ones(2) * 4)[1], x * 4)
    assert_same(fn(state, x, None)[1], x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16, torch.complex64, torch.bool])
def test_a_new_dtype_is_a_variant(dtype: torch.dtype) -> None:
    state, fn = compiled(lambda x: x * 2 + 1, (torch.ones(3),))
    x = torch.ones(3).to(dtype)
    assert_same(fn(state, x)[1], x * 2 + 1)
    assert_same(fn(state, torch.ones(3))[1], torch.full((3,), 3.0))
    assert fn.cache_info().captures == 2


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_new_strides_give_right_values(backend: str) -> None:
    x = torch.arange(12.0).view(3, 4)
    state, fn = compiled(lambda x: x * 2 + x.sum(0), (x,), backend=backend)
    for other in (
        x,
        torch.arange(12.0).view(4, 3).t(),
        torch.arange(24.0).view(3, 8)[:, ::2],
        torch.ones(1, 4).expand(3, 4),
    ):
        assert_same(fn(state, other)[1], other * 2 + other.sum(0))


def test_requires_grad_decides_the_variant() -> None:
    x = torch.tensor([2.0])
    state, fn = compiled(lambda x: x * 3, (x,))
    assert not fn(state, x)[1].requires_grad
    leaf = x.clone().requires_grad_()
    fn(state, leaf)[1].sum().backward()
    assert_same(leaf.grad, torch.tensor([3.0]))
    assert not fn(state, x)[1].requires_grad
    assert fn.cache_info().compiled_graphs == 3, "one inference graph, one forward and one backward"


def test_alternating_training_and_evaluation_makes_two_variants() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    state, fn = compiled(model, (x,))
    for _ in range(10):
        state, out = fn(state, fn.params, x)
        out.sum().backward()
        with torch.no_grad():
            state, out = fn(state, fn.params, x)
        assert not out.requires_grad
    assert fn.cache_info().compiled_graphs == 3


def test_inference_mode_is_a_mode_like_no_grad() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.inference_mode():
        state, fn = compiled(model, (x,))
        _, inside = fn(state, fn.params, x)
    with torch.no_grad():
        assert_same(fn(state, fn.params, x)[1], inside.clone())
    _, out = fn(state, fn.params, x)
    out.sum().backward()
    assert_same(out.detach(), inside.clone())
    assert model.weight.grad is not None


def test_compiled_without_gradients_then_trained() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.no_grad():
        state, fn = compiled(model, (x,))
    _, out = fn(state, fn.params, x)
    out.sum().backward()
    assert_same(model.bias.grad, torch.full((2,), 4.0))


def test_ambient_autocast_is_part_of_the_variant() -> None:
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    state, fn = compiled(model, (x,))
    assert fn(state, fn.params, x)[1].dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = fn(state, fn.params, x)[1], model(x)
    assert out.dtype is torch.bfloat16
    assert_same(out, expected)
    out.sum().backward()
    assert model.weight.grad.dtype is torch.float32
    assert fn(state, fn.params, x)[1].dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert fn(state, fn.params, x)[1].dtype is torch.float16


def test_numbers_in_the_output_are_those_of_the_call() -> None:
    state, fn = compiled(lambda x: (x * 2, len(x), x.shape[1] / 2), (torch.ones(2, 3),))
    for rows, columns in ((2, 3), (5, 4), (2, 3)):
        assert fn(state, torch.ones(rows, columns))[1][1:] == (rows, columns / 2)


def test_autocast_at_compile_time_does_not_stick() -> None:
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state, fn = compiled(model, (x,))
    assert_same(fn(state, fn.params, x)[1], model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(fn(state, fn.params, x)[1], model(x))


def test_a_new_default_dtype_is_a_variant() -> None:
    x = torch.ones(3)
    state, fn = compiled(lambda x: x + torch.zeros(3), (x,))
    torch.set_default_dtype(torch.float64)
    try:
        assert fn(state, x)[1].dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert fn(state, x)[1].dtype is torch.float32
