"""Outputs and gradients of an FP8 linear layer are within the provable error of rounding, at any shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scoped_fn as sf
from tests.cases.casekit import assert_fp8_linear
from tests.fp8.scoped import KINDS, recipe, scoped

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(7, 10, 3), (16, 32, 15), (1, 1, 1), (33, 130, 65), (3, 300, 129)]
BOUNDS: dict[str, dict[str, Any]] = {
    "delayed": {},
    "current": {},
    "block": {"gx": (1, 128), "gw": (128, 128), "fmt_g": "e4m3"},
    "mx": {"gx": (1, 32), "gw": (1, 32), "fmt_g": "e4m3"},
}


def stepped(model: nn.Linear, x: Tensor, dy: Tensor, of: Any, **options: Any) -> list[Tensor | None]:
    """y, dx, dw and db of a second step, whose delayed scales fit the data."""
    run = scoped(model, (x.requires_grad_(),), of, **options)
    params = {name: own.requires_grad_() for name, own in run.params.items()}
    state = run.state
    for _ in range(2):
        for leaf in (x, *params.values()):
            leaf.grad = None
        state, sinks = sf.watch_gradients(state)
        state, y = run.fn(state, params, x)
        y.backward(dy)
        state = sf.update_scales(sf.stage_gradients(state, sinks))
    return [y, x.grad, params["weight"].grad, params["bias"].grad if "bias" in params else None]


def within(model: nn.Linear, x: Tensor, dy: Tensor, kind: str, out_rel: float = 0.0, **options: Any) -> None:
    results = stepped(model, x, dy, kind, **options)
    assert [one.dtype for one in results if one is not None] == [x.dtype] * (3 if model.bias is None else 4)
    assert_fp8_linear(x, model.weight, model.bias, dy, *results, out_rel=out_rel, **BOUNDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape(shape: tuple[int, int, int], kind: str) -> None:
    rows, inputs, outputs = shape
    within(nn.Linear(inputs, outputs), torch.randn(rows, inputs), torch.randn(rows, outputs), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [(), (2, 3), (2, 1, 4)], ids=str)
def test_any_number_of_dimensions(lead: tuple[int, ...], kind: str) -> None:
    within(nn.Linear(10, 3, bias=False), torch.randn(*lead, 10), torch.randn(*lead, 3), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exponent", [-30, -12, 12, 30])
def test_any_size_of_numbers(exponent: int, kind: str) -> None:
    x, dy = torch.randn(7, 10) * 2.0**exponent, torch.randn(7, 3) * 2.0**-exponent
    within(nn.Linear(10, 3, bias=False), x, dy, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-10)])
def test_any_dtype(dtype: torch.dtype, unit: float, kind: str) -> None:
    model = nn.Linear(34, 5, bias=False).to(dtype)
    within(model, torch.randn(6, 34, dtype=dtype), torch.randn(6, 5, dtype=dtype), kind, out_rel=2 * unit)


@pytest.mark.parametrize("kind", KINDS)
def test_inductor(kind: str) -> None:
    within(nn.Linear(10, 3), torch.randn(7, 10), torch.randn(7, 3), kind, backend="inductor")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [(0,), (2, 0)], ids=str)
def test_an_empty_batch(lead: tuple[int, ...], kind: str) -> None:
    y, dx, dw, db = stepped(nn.Linear(10, 3), torch.randn(*lead, 10), torch.randn(*lead, 3), kind)
    assert (y.shape, dx.shape) == ((*lead, 3), (*lead, 10))
    assert (dw.shape, db.shape) == ((3, 10), (3,))
    assert not dw.any()
    assert not db.any()


@pytest.mark.parametrize("of", [{"use_power_2_scales": True}, {"fp8_format": "E4M3"}], ids=str)
def test_fields_of_current_scaling(of: dict[str, Any]) -> None:
    x, dy, model = torch.randn(7, 10), torch.randn(7, 3), nn.Linear(10, 3, bias=False)
    fields = {name: sf.Format.E4M3 if name == "fp8_format" else value for name, value in of.items()}
    results = stepped(model, x, dy, recipe("current", **fields))
    narrow = "e4m3" if "fp8_format" in fields else "e5m2"
    assert_fp8_linear(x, model.weight, None, dy, *results, fmt_g=narrow)
    default = stepped(model, x, dy, recipe("current"))
    assert not torch.equal(results[1], default[1])
