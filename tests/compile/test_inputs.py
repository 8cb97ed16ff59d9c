"""Dtypes, layouts and sizes of inputs: values and gradients equal eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.cases.casekit import weighted_loss
from tests.helpers import assert_same, assert_trains_like_eager, compiled, fresh

BACKENDS = pytest.mark.parametrize("backend", ["eager", "inductor"])

FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_a_model_of_any_floating_dtype_trains_like_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
    x = torch.randn(5, 4).to(dtype).requires_grad_()
    assert_trains_like_eager(model, (x,), rtol=1e-6, atol=1e-6)


def test_a_bfloat16_model_trains_like_eager_under_inductor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).bfloat16()
    assert_trains_like_eager(model, (torch.randn(5, 4).bfloat16(),), backend="inductor", rtol=2e-2, atol=2e-2)


def test_float64_gradients_pass_the_finite_difference_check() -> None:
    torch.manual_seed(0)
    weight, x = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    state, fn = compiled(lambda w, x: (x @ w).tanh().logsumexp(0), (weight, x))
    assert torch.autograd.gradcheck(lambda w, x: fn(state, w, x)[1], (weight, x))


def _differentiates_like_eager(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor, backend: str = "eager", tolerance: float = 1e-6
) -> None:
    def leaves() -> list[torch.Tensor]:
        return [one.detach().requires_grad_(one.is_floating_point() or one.is_complex()) for one in inputs]

    ours, theirs = leaves(), leaves()
    state, fn = compiled(function, tuple(ours), backend=backend)
    _, out = fn(state, *ours)
    expected = function(*theirs)
    assert_same(out, expected, rtol=tolerance, atol=tolerance)
    assert out.requires_grad == expected.requires_grad
    if expected.requires_grad:
        weighted_loss(out).backward()
        weighted_loss(expected).backward()
        assert_same([one.grad for one in ours], [one.grad for one in theirs], rtol=tolerance, atol=tolerance)


def test_complex_inputs_differentiate_like_eager() -> None:
    z = torch.randn(3, 3, dtype=torch.complex128)
    _differentiates_like_eager(lambda z: (z @ z).abs().square() + (z * z.conj()).real, z)
    _differentiates_like_eager(lambda z: z.exp() * 1j, z)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integer_and_bool_inputs(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1], [1, 3]]).to(dtype)
    _differentiates_like_eager(lambda x: x.sum(0), x)
    _differentiates_like_eager(lambda x, scale: x * scale, x, torch.tensor([2.0, 3.0]))


def test_integer_outputs_need_no_gradient() -> None:
    x = torch.randn(4, requires_grad=True)
    state, fn = compiled(lambda x: (x * 2, x.argmax(), x > 0, x.detach()), (x,))
    _, out = fn(state, x)
    assert [one.requires_grad for one in out] == [True, False, False, False]
    out[0].sum().backward()
    assert_same(x.grad, torch.full((4,), 2.0))


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "strided": lambda: torch.arange(24.0).view(4, 6)[:, ::2],
    "offset": lambda: torch.arange(16.0)[4:].view(4, 3),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "expanded scalar": lambda: torch.tensor(2.0).expand(4, 3),
    "negated view": lambda: torch._neg_view(torch.arange(12.0).view(4, 3)),
    "imaginary of conjugate": lambda: torch.complex(torch.ones(4, 3), torch.arange(12.0).view(4, 3)).conj().imag,
    "overlapping": lambda: torch.arange(6.0).as_strided((4, 3), (1, 1)),
}


@BACKENDS
@pytest.mark.parametrize("name", VIEWS)
def test_views_give_the_values_of_eager(name: str, backend: str) -> None:
    _differentiates_like_eager(
        lambda x: (x.sin() * 2 + x[0]).cumsum(-1), VIEWS[name](), backend=backend, tolerance=1e-5
    )


@pytest.mark.parametrize("name", VIEWS)
def test_views_given_to_a_function_compiled_for_another_layout(name: str) -> None:
    function = lambda x: (x.sin() * 2 + x[0]).cumsum(-1)  # noqa: E731
    state, fn = compiled(function, (torch.ones(4, 3),), backend="inductor")
    view = VIEWS[name]()
    assert_same(fn(state, view)[1], function(view), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning")
@BACKENDS
def test_conjugate_views(backend: str) -> None:
    z = torch.randn(3, 2, dtype=torch.complex64)
    for view in (z.conj(), z.t().conj(), z.mH):
        _differentiates_like_eager(lambda z: z * 2 + z.abs().sum(), view, backend=backend, tolerance=1e-5)


def test_a_conjugate_view_given_to_a_function_compiled_without_one() -> None:
    z = torch.randn(3, 2, dtype=torch.complex64)
    state, fn = compiled(lambda z: z * 1j, (z,))
    assert_same(fn(state, z.conj())[1], z.conj() * 1j)


@BACKENDS
def test_channels_last_keeps_eagers_strides(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    _, fn = assert_trains_like_eager(model, (x,), backend=backend, rtol=1e-4, atol=1e-5)
    state, fn = compiled(model, (x,), backend=backend)
    assert fn(state, fn.params, x)[1].stride() == model(x).stride()


@BACKENDS
def test_empty_batches(backend: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    assert_trains_like_eager(model, (torch.zeros(0, 3, requires_grad=True),), backend=backend)
    state, fn = compiled(model, (torch.randn(4, 3),), backend=backend)
    _, out = fn(state, fn.params, torch.zeros(0, 3))
    assert out.shape == (0, 2)
    out.sum().backward()
    assert_same(model[0].weight.grad, torch.zeros(2, 3))


def test_scalars_of_rank_zero() -> None:
    _differentiates_like_eager(lambda x: x * 3, torch.tensor(2.0))


@BACKENDS
@pytest.mark.parametrize("layout", ["expanded", "transposed", "channels last"])
def test_gradients_of_any_layout_are_accepted(layout: str, backend: str) -> None:
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    state, fn = compiled(lambda x: x.sin() * x, (x,), backend=backend)
    cotangent = {
        "expanded": torch.tensor(1.0).expand(2, 3, 4, 4),
        "transposed": torch.randn(2, 3, 4, 4).transpose(-1, -2),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }[layout]
    fn(state, x)[1].backward(cotangent)
    ours, x.grad = x.grad, None
    (x.sin() * x).backward(cotangent)
    assert_same(ours, x.grad, rtol=1e-5, atol=1e-5)


def test_an_input_that_is_no_leaf_passes_its_gradient_on() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    state, fn = compiled(lambda y: y * y, (x.detach().requires_grad_(),))
    fn(state, x * 3)[1].sum().backward()
    assert_same(x.grad, 18 * x.detach())


def test_a_constant_tensor_in_the_function_is_read() -> None:
    constant = torch.tensor([10.0, 20.0])
    state, fn = compiled(lambda x: x + constant, (torch.ones(2),))
    assert_same(fn(state, torch.zeros(2))[1], constant)


def test_parameters_given_as_inference_tensors_are_read() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        state, fn = compiled(model, (torch.ones(2),))
    with torch.inference_mode():
        params = {name: parameter.clone() for name, parameter in fn.params.items()}
        _, out = fn(state, params, torch.ones(2))
    assert_same(out.clone(), model(torch.ones(2)).detach())


def test_a_nested_list_of_many_inputs_stays_in_order() -> None:
    many = [torch.full((2,), float(index), requires_grad=True) for index in range(20)]
    state, fn = compiled(lambda many: sum((index + 1) * one for index, one in enumerate(many)), (many,))
    again = fresh(many)
    fn(state, again)[1].sum().backward()
    assert [one.grad[0].item() for one in again] == [float(index + 1) for index in range(20)]
