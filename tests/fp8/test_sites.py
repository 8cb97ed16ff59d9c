"""The names of sites, and the layers that `skip` means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scoped_fn as sf
from tests.fp8.networks import LowRank, Tied, Twice, mlp
from tests.fp8.scoped import example, recipe, rescoped, scoped

pytestmark = pytest.mark.usefixtures("one_thread")


class Own(nn.Module):
    """A product with a parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table


class Outer(nn.Module):
    """Layers inside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
        self.inner, self.lm_head = Own(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.inner(x))


class Written(nn.Module):
    """A layer of one's own, whose weight is transposed or cast on the way."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.weight = form, nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "transposed":
            return x @ self.weight.T
        return F.linear(x.bfloat16(), self.weight.to(torch.bfloat16))


def written(form: str) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.ReLU(), Written(form))


def argument(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def two_arguments(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return x @ first @ second


NAMES: dict[str, tuple[Callable[[], Any], tuple[tuple[int, ...], ...], tuple[str, ...]]] = {
    "layers": (mlp, ((3, 8),), ("0", "2")),
    "nested": (Outer, ((3, 8),), ("blocks.0.0", "blocks.1.0", "inner.table", "lm_head")),
    "parameter": (Own, ((3, 8),), ("table",)),
    "tied": (Tied, ((3, 8),), ("first", "second")),
    "twice": (Twice, ((3, 8),), ("fc",)),
    "adapted": (LowRank, ((3, 8),), ("base", "a", "b")),
    "transposed": (written("transposed"), ((3, 8),), ("1",)),
    "cast": (written("cast"), ((3, 8),), ("1",)),
    "argument": (lambda: argument, ((3, 8), (4, 8)), ("w",)),
    "two arguments": (lambda: two_arguments, ((3, 8), (8, 4), (4, 2)), ("first", "second")),
}


@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_names_of_sites(which: str, capture: str) -> None:
    make, shapes, expected = NAMES[which]
    state = sf.autocast(sf.init_state(), recipe("current"))
    inputs = tuple(torch.randn(shape) for shape in shapes)
    _, fn = sf.compile(state, make(), inputs, backend="eager", capture=capture)
    assert isinstance(fn.sites, tuple)
    if (which, capture) == ("tied", "trace"):  # a plain trace sees no modules: sites are called after their weights
        expected = ("first",)
    assert sorted(fn.sites) == sorted(expected)


def test_columns_are_named_by_site_and_role() -> None:
    run = scoped(Outer(), (torch.randn(3, 8),))
    columns = run.state.fp8[run.fn.owner].columns
    assert {site for site, _ in columns} == set(run.fn.sites)
    assert {role for _, role in columns} == {"input", "weight", "grad_output"}
    assert set(sf.describe_fp8(run.state)) == set(run.fn.sites)


@pytest.mark.parametrize(
    ("skip", "kept"),
    [
        (("lm_head",), {"lm_head"}),
        (("blocks.0.0",), {"blocks.0.0"}),
        (("blocks.0.*",), {"blocks.0.0"}),
        (("blocks.*",), {"blocks.0.0", "blocks.1.0"}),
        (("table", "*head"), {"inner.table", "lm_head"}),
        (("1.0",), {"blocks.1.0"}),
    ],
    ids=str,
)
def test_patterns_of_layers(skip: tuple[str, ...], kept: set[str]) -> None:
    run = scoped(Outer(), (torch.randn(3, 8),), "current", skip=skip)
    assert set(run.fn.sites) == set(NAMES["nested"][2]) - kept


@pytest.mark.parametrize("pattern", ["head", "block.0", "blocks", "LM_HEAD", "nothing*"])
def test_a_pattern_that_matches_no_layer_lists_the_layers(pattern: str) -> None:
    with pytest.raises(sf.SpecError, match="Expected") as caught:
        scoped(Outer(), (torch.randn(3, 8),), skip=("lm_head", pattern))
    assert pattern in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES["nested"][2])


def test_a_pattern_is_looked_at_when_a_scope_is_met_later() -> None:
    run, data = example()
    with pytest.raises(sf.SpecError, match=r"nowhere(.|\n)*net\.0"):
        run.fn(rescoped(run.state, recipe(), skip=("nowhere",)), run.params, *data[0])
    assert run.fn(run.state, run.params, *data[0])[1].isfinite()


def test_with_several_functions_the_owner_has_to_be_said() -> None:
    first, _ = example()
    second = scoped(mlp(), (torch.randn(3, 8),), state=sf.end_autocast(first.state))
    with pytest.raises((TypeError, ValueError), match="Expected .*owner"):
        sf.describe_fp8(second.state)
    assert set(sf.describe_fp8(second.state, second.fn.owner)) == {"0", "2"}
    assert set(sf.describe_fp8(second.state, first.fn.owner)) == {"net.0", "net.2"}


def test_a_released_function_takes_its_scales_along() -> None:
    run, _ = example()
    assert run.fn.owner not in sf.release(run.state, run.fn).fp8


class Beside(nn.Module):
    """A layer called as a product without a parameter would be, and such a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("big", torch.randn(8, 8) * 1e4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.big), self.linear(x)


class TwiceNormed(nn.Module):
    """A layer with a computed weight, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x))


@pytest.mark.parametrize(
    ("model", "expected"), [(Beside, {"linear", "linear_1"}), (TwiceNormed, {"fc"})], ids=["beside", "twice normed"]
)
def test_no_two_weights_have_one_name_and_no_layer_two(model: Callable[[], nn.Module], expected: set[str]) -> None:
    torch.manual_seed(0)
    _, fn = sf.compile(sf.autocast(sf.init_state(), recipe("delayed")), model(), (torch.randn(3, 8),), backend="eager")
    assert set(fn.sites) == expected


class Changed(nn.Module):
    """A copy of a weight that is changed in place before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        w = self.w.clone()
        w.masked_fill_(w < 0, 5.0)
        return F.linear(x, w)


def test_a_weight_that_is_changed_in_place_is_not_quantized_beforehand() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    state, fn = sf.compile(sf.autocast(sf.init_state(), recipe("current")), Changed(), (x,), backend="eager")
    state, weights = sf.quantize_weights(state, fn, fn.params)
    assert torch.equal(fn(state, weights, x)[1], fn(state, fn.params, x)[1])
