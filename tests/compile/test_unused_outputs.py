"""A loss that uses only some outputs has the gradients of eager: nothing is sent through what the loss does not use."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers import compiled

USED = [used for used in itertools.product([False, True], repeat=4) if any(used)]


def four_outputs(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = (x @ w).tanh()
    return hidden, hidden.sum(0) * w.sum(), w.pow(2).sum() + x.sum(), x.sqrt()


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    w, x = (torch.rand(4, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    x[0, 0] = 0  # where the derivative of the square root is infinite
    return w.requires_grad_(), x.requires_grad_()


def gradients(function: Callable[..., Any], used: tuple[bool, ...]) -> list[torch.Tensor | None]:
    w, x = arguments()
    outputs = function(w, x)
    torch.stack([(i + 1) * out.sum() for i, out in enumerate(outputs) if used[i]]).sum().backward()
    return [w.grad, x.grad]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_each_choice_of_outputs_has_eagers_gradients(backend: str) -> None:
    state, fn = compiled(four_outputs, arguments(), backend=backend)
    for used in USED if backend == "eager" else USED[::5]:
        ours = gradients(lambda w, x: fn(state, w, x)[1], used)
        theirs = gradients(four_outputs, used)
        assert [one is None for one in ours] == [one is None for one in theirs], used
        for one, other in zip(ours, theirs, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, equal_nan=True)


def test_an_unused_infinite_derivative_is_not_met() -> None:
    x = torch.zeros(3, requires_grad=True)
    state, fn = compiled(lambda x: (x.sqrt(), x * 2), (x,))
    fn(state, x)[1][1].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_choice_of_outputs_is_compiled_once() -> None:
    state, fn = compiled(four_outputs, arguments())
    for _ in range(3):
        gradients(lambda w, x: fn(state, w, x)[1], (True, False, False, False))
    assert fn.cache_info().compiled_graphs == 3
