"""Buffers travel in the state: changed ones come back in the next state, and the module keeps its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import scoped_fn as sf
from scoped_fn.state import set_buffers
from tests.compile.models import InPlace, Reassigned
from tests.helpers import assert_same, assert_trains_like_eager, compiled


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.cache[position] = x
        return self.cache.cumsum(0)


def _run_against_eager(model: nn.Module, calls: list[tuple[torch.Tensor, ...]], **options: object) -> None:
    twin = copy.deepcopy(model)
    state, fn = compiled(model, calls[0], **options)
    for inputs in calls:
        state, out = fn(state, fn.params, *inputs)
        assert_same(out, twin(*inputs), rtol=1e-6, atol=1e-6)
        held = {name: state.buffers[fn.owner][name] for name, _ in twin.named_buffers()}
        assert_same(held, dict(twin.named_buffers()), rtol=1e-6, atol=1e-6, what="buffer")
        assert not any(buffer.requires_grad for buffer in held.values())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("model", [InPlace, Reassigned], ids=lambda model: model.__name__)
def test_changed_buffers_are_threaded_over_calls(model: type[nn.Module], grad: bool, backend: str) -> None:
    with torch.set_grad_enabled(grad):
        _run_against_eager(model(), [(torch.tensor([float(index), -1.0]),) for index in range(4)], backend=backend)


def test_an_indexed_write_is_threaded() -> None:
    _run_against_eager(Indexed(), [(torch.tensor([2.0]), torch.tensor([index])) for index in range(4)])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_batch_norm_trains_then_evaluates_like_eager(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    twin, images = copy.deepcopy(model), torch.randn(4, 2, 6, 6)
    state, train = compiled(model, (images,), backend=backend)
    for _ in range(3):
        state, out = train(state, train.params, images)
        assert_same(out, twin(images), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        state, evaluate = sf.compile(state, model.eval(), (images,), backend=backend)
        learned = dict(state.buffers[train.owner])
        state = set_buffers(state, evaluate.owner, learned)
        after, out = evaluate(state, train.params, images)
    assert after is state, "evaluation changes no buffer"
    assert_same(out, twin.eval()(images), rtol=1e-5, atol=1e-5)


def test_batch_norm_gradients_equal_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    assert_trains_like_eager(model, (torch.randn(5, 3, dtype=torch.float64),), rtol=1e-10, atol=1e-12)


def test_batch_norm_whose_momentum_depends_on_its_counter_is_refused() -> None:
    with pytest.raises(sf.CaptureError, match=r"Expected BatchNorm1d .*, got .*(?i:data-dependent|item)"):
        compiled(nn.BatchNorm1d(3, momentum=None), (torch.randn(5, 3),))


def test_an_old_state_still_gives_the_old_result() -> None:
    x = torch.tensor([1.0, 2.0])
    old, fn = compiled(InPlace(), (x,))
    first = fn(old, fn.params, x)[1]
    state = old
    for _ in range(3):
        state, _ = fn(state, fn.params, x)
    assert state.buffers[fn.owner]["calls"].item() == 3
    assert_same(fn(old, fn.params, x)[1], first)
    assert old.buffers[fn.owner]["calls"].item() == 0


def test_replaced_buffers_are_the_ones_used() -> None:
    x = torch.tensor([1.0, 1.0])
    state, fn = compiled(InPlace(), (x,))
    state = set_buffers(state, fn.owner, {"total": torch.tensor([5.0, 6.0]), "calls": torch.tensor(10)})
    state, out = fn(state, fn.params, x)
    assert_same(out, torch.tensor([7.0, 9.0]) + torch.zeros(2))
    assert state.buffers[fn.owner]["calls"].item() == 11


def test_a_buffer_that_is_never_touched_stays_in_the_state() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("note", torch.arange(3))
    state, fn = compiled(model, (torch.ones(2),))
    assert_same(state.buffers[fn.owner]["note"], torch.arange(3))


def test_a_buffer_that_is_no_part_of_the_state_dict_is_threaded_too() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x + self.count

    _run_against_eager(Hidden(), [(torch.ones(2),) for _ in range(3)])


def test_one_buffer_under_two_names_is_one_buffer() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.again = self.norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.norm(x))

    torch.manual_seed(0)
    _run_against_eager(Shared(), [(torch.randn(5, 2),) for _ in range(2)])


def test_a_missing_or_foreign_buffer_is_refused() -> None:
    x = torch.ones(2)
    state, fn = compiled(InPlace(), (x,))
    with pytest.raises(sf.OwnershipError, match=r"Expected .*calls.*, got .*"):
        fn(set_buffers(state, fn.owner, {"total": torch.zeros(2)}), fn.params, x)
    with pytest.raises(sf.SpecError, match=r"Expected .*, got .*"):
        fn(set_buffers(state, fn.owner, {"total": torch.zeros(3), "calls": torch.tensor(0)}), fn.params, x)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gradients_flow_from_a_buffer_that_was_changed_in_the_same_call(backend: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([4.0, -2.0]))
            self.register_buffer("average", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.average.mul_(0.5).add_(0.5 * self.weight)
            return (x * self.weight * self.average).sum()

    assert_trains_like_eager(Mixed(), (torch.tensor([1.0, 3.0]),), backend=backend)


def test_states_of_one_function_can_fork() -> None:
    x = torch.tensor([1.0, 1.0])
    root, fn = compiled(InPlace(), (x,))
    left, _ = fn(root, fn.params, x)
    right, _ = fn(root, fn.params, 5 * x)
    assert_same(left.buffers[fn.owner]["total"], torch.tensor([1.0, 1.0]))
    assert_same(right.buffers[fn.owner]["total"], torch.tensor([5.0, 5.0]))
    assert_same(root.buffers[fn.owner]["total"], torch.zeros(2))
