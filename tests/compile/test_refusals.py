"""Models that are refused at capture: the error names the user's line, the argument and the operation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.helpers import assert_mentions, assert_same, compiled, process_unchanged

X = torch.ones(4, 3)
FORM = r"(?s)Expected .*, got .*\."


def branches(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:  # the line that cannot be captured
        return x
    return -x


def takes_item(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item() if x.sum().item() > 1 else x


def calls_numpy_on_values(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([x.sum().tolist()]) * 2


def has_a_shape_that_depends_on_values(x: torch.Tensor) -> torch.Tensor:
    return x[x > 2]


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize(
    "function",
    [branches, takes_item, calls_numpy_on_values, has_a_shape_that_depends_on_values],
    ids=lambda one: one.__name__,
)
def test_code_that_depends_on_values_is_refused_with_its_line(function: Callable[..., Any], capture: str) -> None:
    first = inspect.getsourcelines(function)[1]
    with process_unchanged(), pytest.raises(sf.CaptureError, match=FORM) as caught:
        compiled(function, (X,), capture=capture)
    assert_mentions(caught.value, rf"{__file__}.{{0,12}}{first + 1}\b")


def test_the_line_inside_a_module_is_found() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return branches(x)

    with pytest.raises(sf.CaptureError, match="test_refusals.py"):
        compiled(nn.Sequential(nn.Linear(3, 3), Branching()), (X,))


def in_place_add(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    rows.add_(1)
    return x + rows


def in_place_index(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    rows[0] = 5
    return x + rows


def in_place_through_a_view(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    rows.view(-1)[1:].mul_(2)
    return x + rows


def in_place_out(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    torch.add(x, 1, out=rows)
    return rows


def in_place_copy(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    rows.copy_(x)
    return rows * 2


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize(
    ("function", "operation"),
    [(in_place_add, "add_"), (in_place_index, "setitem|copy_|fill_|index_put_"), (in_place_through_a_view, "mul_"),
     (in_place_out, "add"), (in_place_copy, "copy_")],
    ids=["add_", "setitem", "view", "out", "copy_"],
)  # fmt: skip
def test_a_changed_input_is_refused_by_name_and_operation(
    function: Callable[..., Any], operation: str, capture: str
) -> None:
    rows = torch.zeros(4, 3)
    with process_unchanged(), pytest.raises(sf.MutationError, match=r"(?s)Expected .*, got .*rows") as caught:
        compiled(function, (X, rows), capture=capture)
    assert_mentions(caught.value, operation)
    assert_same(rows, torch.zeros(4, 3))


def test_a_changed_input_inside_a_structure_is_named() -> None:
    def function(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["tokens"].mul_(2)
        return batch["tokens"] + 1

    with pytest.raises(sf.MutationError, match=r"(?s)batch.*tokens.*mul_"):
        compiled(function, ({"tokens": torch.ones(3)},))


def test_a_changed_parameter_is_refused() -> None:
    class Renormalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5)
            return x * self.weight

    model = Renormalised()
    with pytest.raises(sf.MutationError, match=r"(?s)weight.*mul_"):
        compiled(model, (X,))
    assert_same(model.weight.detach(), torch.ones(3))


def test_a_changed_closure_is_refused() -> None:
    held = torch.zeros(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        held.add_(1)
        return x + held

    with pytest.raises(sf.CaptureError, match="(?i)in place|mutat|change"):
        compiled(function, (X,))
    assert_same(held, torch.zeros(3))


def test_a_list_that_would_grow_is_left_alone_and_named() -> None:
    log: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        log.append(1)
        return x + 1

    with pytest.warns(UserWarning, match=r"Expected .*, got .*(log|closure)"):
        compiled(function, (X,))
    assert log == []


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_a_model_that_raises_says_why(capture: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the width must be even")

    with process_unchanged(), pytest.raises((ValueError, sf.CaptureError), match="the width must be even"):
        compiled(function, (X,), capture=capture)


def test_a_shape_mistake_in_the_model_names_its_line() -> None:
    with process_unchanged(), pytest.raises(RuntimeError, match="test_refusals.py") as caught:
        compiled(lambda x: x @ x, (X,))
    assert_mentions(caught.value, "3")
