"""A compiled function is pure: it writes to nothing it was given, and its results share no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.helpers import assert_disjoint, assert_same, compiled, fresh, process_unchanged, unchanged


class Block(nn.Module):
    """Convolution, batch norm and a linear head: parameters, buffers that change, buffers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 2)
        self.register_buffer("offset", torch.arange(2.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.convolution(images)).relu().mean((2, 3))
        return self.head(features) + self.offset


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_training_writes_to_nothing_it_was_given(backend: str) -> None:
    model, images = Block(), torch.randn(4, 2, 5, 5)
    before = copy.deepcopy(model.state_dict())
    old, fn = compiled(model, (images,), backend=backend)
    params = fresh(fn.params)
    with unchanged(images, params, old):
        new, out = fn(old, params, images)
        out.sum().backward()
    assert_same(dict(model.state_dict()), dict(before))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not sf.tree_equal(new, old), "batch norm's statistics must have moved"


def test_compiling_writes_to_nothing() -> None:
    model, images = Block(), torch.randn(4, 2, 5, 5)
    modules = dict(model.named_modules())
    attributes = {name: set(vars(module)) for name, module in modules.items()}
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    with process_unchanged(), unchanged(model.state_dict(), images):
        compiled(model, (images,))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert model.training


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_same_call_twice_gives_the_same_bits(backend: str, grad: bool) -> None:
    model, images = Block(), torch.randn(4, 2, 5, 5)
    with torch.set_grad_enabled(grad):
        old, fn = compiled(model, (images,), backend=backend)
        first, second = fn(old, fn.params, images), fn(old, fn.params, images)
    assert sf.tree_equal(first[0], second[0])
    assert_same(first[1], second[1])


def test_a_call_that_changes_nothing_returns_the_very_state() -> None:
    model, rows = nn.Linear(3, 2), torch.randn(4, 3)
    old, fn = compiled(model, (rows,))
    assert fn(old, fn.params, rows)[0] is old
    with torch.no_grad():
        assert fn(old, fn.params, rows)[0] is old


def _many_aliases(x: torch.Tensor) -> Any:
    doubled = x * 2
    return x, x.view(-1), x.t(), doubled, doubled, doubled[0], doubled.detach(), x.expand(2, *x.shape)


ALIASING: dict[str, Callable[[torch.Tensor], Any]] = {
    "many": _many_aliases,
    "input": lambda x: x,
    "view": lambda x: x[1:],
    "twice": lambda x: (x + 1,) * 2,
    "slices": lambda x: (x + 1).split(1),
    "real": lambda x: torch.view_as_real(torch.complex(x, x))[..., 0],
    "transposed": lambda x: {"up": x.t(), "down": x.t()},
    "reshaped": lambda x: x.reshape(-1),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", ALIASING)
def test_outputs_share_no_memory(name: str, needs_grad: bool) -> None:
    x = torch.arange(6.0).view(2, 3).requires_grad_(needs_grad)
    state, fn = compiled(ALIASING[name], (x,))
    _, out = fn(state, x)
    assert_disjoint(x, out)
    assert_same(out, ALIASING[name](x))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_outputs_share_no_memory_with_parameters_buffers_or_constants(backend: str) -> None:
    constant = torch.ones(3)

    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(3.0))
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> Any:
            self.count.add_(x)
            return self.weight, self.weight[:2], self.count, self.count.view(3, 1), constant, x * 1

    model, x = Leaky(), torch.ones(3)
    old, fn = compiled(model, (x,), backend=backend)
    new, out = fn(old, fn.params, x)
    again = fn(new, fn.params, x)
    assert_disjoint(x, fn.params, old.buffers[fn.owner]["count"], new.buffers[fn.owner]["count"], constant, out)
    assert_disjoint(out, again[1], again[0].buffers[fn.owner]["count"], list(model.buffers()))
    assert_same(out, Leaky()(x))


def test_writing_to_an_output_harms_nobody() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    old, fn = compiled(lambda y: (y, y + 1), (x,))
    with unchanged(x):
        _, (same, _) = fn(old, x)
        same.fill_(9.0)
    state, fn = compiled(model, (x,))
    _, expected = fn(state, fn.params, x)
    with torch.no_grad():
        expected = expected.clone()
        fn(state, fn.params, x)[1].fill_(9.0)
    assert_same(fn(state, fn.params, x)[1].detach(), expected.detach())


def test_state_buffers_are_not_the_modules_tensors() -> None:
    model = Block()
    state, fn = compiled(model, (torch.randn(4, 2, 5, 5),))
    assert set(state.buffers[fn.owner]) == {name for name, _ in model.named_buffers()}
    assert_disjoint(list(model.buffers()), list(state.buffers[fn.owner].values()))


def test_compile_leaves_the_old_state_as_it_was() -> None:
    empty = sf.init_state(key=5)
    state, fn = sf.compile(empty, Block(), (torch.randn(4, 2, 5, 5),), backend="eager")
    assert empty.owners == {}
    assert sf.tree_equal(empty, sf.init_state(key=5))
    assert set(state.owners) == {fn.owner}
    assert state.owners[fn.owner].name == fn.name == "Block"
