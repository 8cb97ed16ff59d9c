"""Backward through a compiled function: plain autograd, custom rules, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf
from tests.compile.models import Loss, StraightThrough
from tests.compile.models import batch as make_batch
from tests.helpers import assert_same, assert_trains_like_eager, compiled

BACKENDS = pytest.mark.parametrize("backend", ["eager", "inductor"])


@BACKENDS
def test_retain_graph_gives_the_same_gradient_twice(backend: str) -> None:
    model, batch = Loss(), make_batch()
    state, fn = compiled(model, batch, backend=backend)
    loss = fn(state, fn.params, *batch)[1]
    first = torch.autograd.grad(loss, list(fn.params.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(fn.params.values()))
    assert_same(first, second)
    with pytest.raises(RuntimeError, match="(?i)second time|already been freed"):
        torch.autograd.grad(loss, list(fn.params.values()))


def test_only_the_gradients_asked_for() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    state, fn = compiled(lambda x, y: (x * 2, y * 3), (x, y))
    _, (first, second) = fn(state, x, y)
    assert_same(torch.autograd.grad(first.sum(), x, retain_graph=True)[0], torch.full((2,), 2.0))
    assert_same(torch.autograd.grad(second.sum(), y)[0], torch.full((2,), 3.0))


@BACKENDS
def test_an_output_that_the_loss_leaves_out_spoils_no_gradient(backend: str) -> None:
    x = torch.zeros(3, requires_grad=True)
    state, fn = compiled(lambda x: (x.sum(), x.sqrt()), (x,), backend=backend)
    fn(state, x)[1][0].backward()
    assert_same(x.grad, torch.ones(3))
    assert_same(sf.value_and_grad(fn, has_aux=True)(state, x.detach())[1][1], torch.ones(3))


def test_an_in_place_change_of_what_was_saved_is_noticed() -> None:
    leaf = torch.ones(3, requires_grad=True)
    state, fn = compiled(lambda x: x.sin(), (leaf,))
    x = leaf * 1
    out = fn(state, x)[1]
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    state, fn = compiled(lambda x: x.exp(), (leaf,))
    out = fn(state, leaf)[1]
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_parameter_may_be_an_input_too() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).sum()

    model = Squared()
    state, fn = compiled(model, (model.weight,))
    fn(state, fn.params, model.weight)[1].backward()
    ours, model.weight.grad = model.weight.grad, None
    model(model.weight).backward()
    assert_same(ours, model.weight.grad)


def test_second_derivatives_by_plain_autograd() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    state, fn = compiled(lambda x: (x**3).sum(), (x,))
    (gradient,) = torch.autograd.grad(fn(state, x)[1], x, create_graph=True)
    assert_same(torch.autograd.grad(gradient.sum(), x)[0], 6 * x.detach())
    assert fn.cache_info().eager_calls == 0


def test_a_function_assembled_by_hand_refuses_second_derivatives_in_words() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    state, captured = sf.stages.capture(sf.init_state(), lambda x: (x**3).sum(), (x,))
    state, joint = sf.stages.lower_training(state, captured)
    state, split = sf.stages.partition(state, joint)
    state, forward = sf.stages.compile_forward(state, split)
    state, backward = sf.stages.compile_backward(state, split)
    state, fn = sf.stages.assemble_training(state, captured, split, forward, backward)
    (gradient,) = torch.autograd.grad(fn(state, x)[1], x, create_graph=True)
    assert_same(gradient.detach(), 3 * x.detach() ** 2)
    with pytest.raises(sf.SpecError, match=r"Expected one derivative of .*Use sf\.compile"):
        gradient.sum().backward()


@BACKENDS
def test_batched_cotangents_of_plain_autograd_stay_compiled(backend: str) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    state, fn = compiled(lambda x: x**3, (x,), backend=backend)
    (rows,) = torch.autograd.grad(fn(state, x)[1], x, torch.eye(2), is_grads_batched=True)
    assert_same(rows, torch.diag(3 * x.detach() ** 2))
    assert fn.cache_info().eager_calls == 0


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch before 2.13 drops the check for singular matrices while it traces"
)
@BACKENDS
@pytest.mark.parametrize("solve", [torch.linalg.inv, torch.linalg.cholesky, lambda a: torch.linalg.solve(a, a[0])])
def test_a_singular_matrix_is_noticed_as_in_eager(solve: Any, backend: str) -> None:
    x = torch.eye(2, dtype=torch.float64) * 2
    state, fn = compiled(solve, (x,), backend=backend)
    assert_same(fn(state, x)[1], solve(x))
    with pytest.raises(torch.linalg.LinAlgError):
        fn(state, torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(torch.linalg.LinAlgError):
        torch.func.grad(lambda x: fn(state, x)[1].sum())(torch.zeros(2, 2, dtype=torch.float64))


def test_an_argument_changed_before_a_second_derivative_is_noticed() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    state, fn = compiled(lambda x: (x * 3).sum(), (x,))
    out = fn(state, x)[1]
    with torch.no_grad():
        x.mul_(2)
    assert_same(torch.autograd.grad(out, x, retain_graph=True)[0], torch.full((2,), 3.0))  # needs no x, as in eager
    with pytest.raises(RuntimeError, match="changed in place"):
        torch.autograd.grad(out, x, create_graph=True)


@BACKENDS
def test_a_custom_function_keeps_its_own_backward(backend: str) -> None:
    x = torch.tensor([0.4, 1.6], requires_grad=True)
    state, fn = compiled(lambda x: StraightThrough.apply(x * 2).sum(), (x,), backend=backend)
    _, out = fn(state, x)
    assert_same(out.detach(), torch.tensor(4.0))
    out.backward()
    assert_same(x.grad, torch.full((2,), 20.0))
    assert_same(sf.value_and_grad(fn)(state, x.detach())[1][1], torch.full((2,), 20.0))


def test_torch_func_inside_the_model_is_kept() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: (y**3).sum())(x) + torch.func.vmap(torch.sum)(x.view(2, 1))

    x = torch.tensor([1.0, 2.0])
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            state, fn = compiled(function, (x,))
            assert_same(fn(state, x)[1], 3 * x**2 + x)
    leaf = x.clone().requires_grad_()
    fn(state, leaf)[1].sum().backward()
    assert_same(leaf.grad, 6 * x + 1)


@BACKENDS
def test_a_checkpointed_model_trains_like_eager(backend: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
            self.second = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.first, x, use_reentrant=False)
            return checkpoint(self.second, x, use_reentrant=False)

    torch.manual_seed(0)
    assert_trains_like_eager(Checkpointed(), (torch.randn(5, 4, requires_grad=True),), backend=backend)


def test_detached_parts_get_no_gradient() -> None:
    x = torch.tensor([2.0], requires_grad=True)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            frozen = x * 5
        return x * frozen, frozen

    state, fn = compiled(function, (x,))
    _, (out, frozen) = fn(state, x)
    assert not frozen.requires_grad
    out.sum().backward()
    assert_same(x.grad, torch.tensor([10.0]))


def test_a_hook_on_a_parameter_runs() -> None:
    model, batch = Loss(), make_batch()
    state, fn = compiled(model, batch)
    seen: list[torch.Size] = []
    handle = fn.params["layers.0.weight"].register_hook(lambda gradient: seen.append(gradient.shape))
    fn(state, fn.params, *batch)[1].backward()
    handle.remove()
    assert seen == [model.layers[0].weight.shape]


def test_saved_tensor_hooks_around_a_call_work() -> None:
    model, batch = Loss(), make_batch()
    state, fn = compiled(model, batch)
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = fn(state, fn.params, *batch)[1]
    loss.backward()
    ours = {name: one.grad for name, one in fn.params.items()}
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(*batch).backward()
    assert packed
    assert_same(ours, {name: one.grad for name, one in twin.named_parameters()}, rtol=1e-5, atol=1e-6)
