"""Random operations at the edges: names of other libraries, logarithms of draws, code that is run again, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scoped_fn as sf
from tests.helpers import assert_same, compiled

X = torch.linspace(-1, 1, 6)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("edges_of_random", "FRAGMENT")
    made.define("normal(Tensor x, Tensor y) -> Tensor")
    made.define("dropout(Tensor x, float p) -> Tensor")
    made.impl("normal", lambda x, y: x + 2 * y, "CompositeExplicitAutograd")
    made.impl("dropout", lambda x, p: x - p, "CompositeExplicitAutograd")
    yield made
    made._destroy()


def test_an_operator_of_another_library_draws_nothing(library: Any) -> None:
    mine = torch.ops.edges_of_random
    state, fn = compiled(lambda x: mine.dropout(mine.normal(x, x), 0.5), (X,))
    after, out = fn(state, X)
    assert_same(out, 3 * X - 0.5)
    assert after is state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_logarithm_of_an_exponential_draw_is_finite(dtype: torch.dtype) -> None:
    zeros = torch.zeros(5000, dtype=dtype)
    state, fn = compiled(lambda x: (F.gumbel_softmax(x), torch.empty_like(x).exponential_()), (zeros,))
    soft, drawn = fn(state, zeros)[1]
    assert soft.isfinite().all()
    assert (drawn > 0).all()


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like, lambda v: F.dropout(v, 0.5)])
def test_a_draw_in_a_region_of_code_that_is_run_again_is_refused(draw: Any) -> None:
    def model(x: Tensor) -> Any:
        region = checkpoint(lambda v: v.sin() * draw(v), x, use_reentrant=False)
        return torch.func.jvp(lambda v: v * v, (region,), (torch.ones_like(x),))[0]

    with pytest.raises(sf.RandomOpError, match="Expected .* to draw outside of checkpoint regions"):
        compiled(model, (X,))


def test_code_that_is_run_again_draws_what_the_graph_would() -> None:
    def model(x: Tensor) -> Any:
        dropped = F.dropout(x, 0.5)
        return torch.func.jvp(lambda v: v * v, (dropped,), (torch.ones_like(x),))[1] + torch.randn(6)

    state, fn = compiled(model, (X,))
    keys = sf.split(state.key, 3)
    after, out = fn(state, X)
    kept = sf.random.bernoulli(keys[1], 0.5, X.shape)
    assert_same(out, 2 * torch.where(kept, X * 2, 0.0) + sf.random.normal(keys[2], (6,)))
    assert torch.equal(after.key, keys[0])


def test_chunks_and_several_calls_do_not_change_the_numbers() -> None:
    state, fn = compiled(lambda x: F.dropout(x, 0.5) + torch.rand_like(x), (X,))

    def twice(state: Any, x: Tensor) -> Any:
        state, first = fn(state, x)
        state, second = fn(state, x)
        return state, (first, second)

    xs = X.expand(5, -1)
    whole = sf.vmap(twice, randomness="different")(state, xs)
    for size in (1, 2, 5):
        found = sf.vmap(twice, randomness="different", chunk_size=size)(state, xs)
        assert_same(found[1], whole[1])
        assert torch.equal(found[0].key, whole[0].key)
    rows = torch.cat(whole[1])
    assert len(rows.unique(dim=0)) == 10


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize("with_indices", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_fractional_pools_draw(dims: int, with_indices: bool, capture: str) -> None:
    kind = nn.FractionalMaxPool2d if dims == 2 else nn.FractionalMaxPool3d
    model, image = kind(2, output_size=3, return_indices=with_indices), torch.randn(1, 2, *[8] * dims)
    state, fn = compiled(model, (image,), capture=capture)
    samples = sf.random.uniform(sf.split(state.key, 2)[1], (1, 2, dims))
    pool = F.fractional_max_pool2d if dims == 2 else F.fractional_max_pool3d
    expected = pool(image, 2, 3, return_indices=with_indices, _random_samples=samples)
    assert_same(fn(state, fn.params, image)[1], expected)


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_a_probability_out_of_range_is_refused(p: float) -> None:
    with pytest.raises((ValueError, sf.CaptureError), match="(?i)probability"):
        compiled(lambda x: torch.dropout(x, p, True), (X,))


def test_a_state_without_a_key_is_refused() -> None:
    from dataclasses import replace

    state: Any = replace(sf.init_state(), key=None)
    with pytest.raises(sf.SpecError, match="Expected a key of shape .2. and dtype uint32, got a NoneType"):
        sf.compile(state, torch.sin, (X,), backend="eager")


def test_another_kind_of_call_of_a_function_that_draws_is_refused_inside_a_trace() -> None:
    def maybe(x: Tensor, train: bool, scale: float) -> Tensor:
        return F.dropout(x, 0.5) * scale if train else x * scale

    state, fn = compiled(maybe, (X, True, 1.0))
    fn(state, X, False, 1.0)
    outer = torch.compile(lambda s, x: fn(s, x, False, 1.0)[1], backend="eager", fullgraph=True)
    assert_same(outer(state, X), X)
    unknown = torch.compile(lambda s, x: fn(s, x, True, 2.0)[1], backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="got a new kind of call"):
        unknown(state, X)


@dataclass
class Arguments:
    x: Tensor
    train: bool


class Pair(NamedTuple):
    x: Tensor
    train: bool


@pytest.mark.parametrize("kind", [Arguments, Pair])
def test_so_it_is_with_structured_inputs(kind: Any) -> None:
    state, fn = compiled(lambda a: F.dropout(a.x, 0.5, a.train), (kind(X, False),))
    outer = torch.compile(lambda s, x: fn(s, kind(x, True)), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="got a new kind of call"):
        outer(state, X)
    quiet = torch.compile(lambda s, x: fn(s, kind(x, False))[1], backend="eager", fullgraph=True)
    assert_same(quiet(state, X), X)


def test_a_function_without_draws_takes_any_kind_of_call_inside_a_trace() -> None:
    state, fn = compiled(lambda x, scale: x * scale, (X, 1.0))
    total = torch.compile(lambda s, x: sum(fn(s, x, float(i))[1] for i in range(3)), backend="eager", fullgraph=True)
    assert_same(total(state, X), 3 * X)
    named = torch.compile(lambda s, x: fn(s, scale=2.0, x=x)[1], backend="eager", fullgraph=True)
    assert_same(named(state, X), 2 * X)


def test_calls_elsewhere_do_not_compile_an_outer_function_anew() -> None:
    compiles: list[int] = []

    def backend(gm: Any, inputs: Any) -> Any:
        compiles.append(1)
        return gm

    state, fn = compiled(torch.sin, (X,))
    outer = torch.compile(lambda s, x: fn(s, x)[1], backend=backend, fullgraph=True)
    for size in range(2, 6):
        assert_same(outer(state, X), X.sin())
        fn(state, torch.ones(size))
    assert len(compiles) == 1


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_so_is_one_of_a_function_that_has_not_drawn_so_far(capture: str) -> None:
    state, fn = compiled(lambda x, train: F.dropout(x, 0.5, train), (X, False), capture=capture)
    outer = torch.compile(lambda s, x, train: fn(s, x, train), backend="eager", fullgraph=True)
    assert_same(outer(state, X, False)[1], X)
    before = torch.get_rng_state()
    with pytest.raises(Exception, match="got a new kind of call"):
        outer(state, X, True)
    with pytest.raises(sf.CaptureError, match="got a new kind of call|SpecError"):
        compiled(lambda state, x: fn(state, x, True), (state, X), capture=capture)
    assert torch.equal(torch.get_rng_state(), before)
    after, out = fn(state, X, True)
    assert_same(outer(state, X, True)[1], out)
    assert torch.equal(outer(state, X, True)[0].key, after.key)
