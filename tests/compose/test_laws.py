"""Laws of derivatives and batches that need no second implementation; eager shows that they hold as written."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils import _pytree as torch_pytree

import scoped_fn as sf
from tests.compose.case import Arguments, Function, compiled_call, eager_call, over_differentiable
from tests.compose.quiet import QUIET
from tests.compose.transforms import case_named
from tests.compose.trees import everywhere, inner, scalar, smooth, stacked, wave, waves
from tests.helpers import assert_same

pytestmark = QUIET

NAMES = ["mlp", "batch statistics", "written attention", "convolution", "running sums", "solving", "loop", "outputs",
         "dict input", "broadcasting", "contraction", "matrix exponential", "in place", "scattered"]  # fmt: skip
CLOSE: dict[str, Any] = {"rtol": 1e-7, "atol": 1e-9}


@functools.cache
def subject(name: str, side: str) -> tuple[Function, Arguments, sf.CompiledFn | None]:
    """The case as a function of its flat arguments, these, and the `CompiledFn` if it is one."""
    case = case_named(name)
    call, fn = compiled_call(case) if side == "compiled" else (eager_call(case), None)
    function, args = over_differentiable(case, call)
    leaves, structure = torch_pytree.tree_flatten(args)
    return lambda *flat: function(*torch_pytree.tree_unflatten(list(flat), structure)), tuple(leaves), fn


def moved(args: Arguments, seed: int) -> Arguments:
    """Other arguments of the same shapes, near the given ones."""
    return tuple(leaf + 0.2 * wave(leaf, seed) for leaf in args)


@contextlib.contextmanager
def compiled_only(fn: sf.CompiledFn | None) -> Iterator[None]:
    """Nothing runs eager in the block, if it is about a compiled function."""
    before = fn.cache_info().eager_calls if fn else 0
    yield
    assert (fn.cache_info().eager_calls if fn else 0) == before, "something ran eager"


def law(*without: str) -> Any:
    """Tries a law on both sides and all cases but those for which eager itself breaks it."""
    names = [name for name in NAMES if name not in without]
    marks = [pytest.mark.parametrize("side", ["eager", "compiled"]), pytest.mark.parametrize("name", names)]
    # Without shrinking: the examples differ in their numbers only.
    options = settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
    return lambda test: functools.reduce(
        lambda made, wrap: wrap(made), [given(st.integers(0, 99)), options, *marks], test
    )


@law()
def test_the_gradient_of_a_sum_over_a_batch_is_the_batch_of_gradients(side: str, name: str, seed: int) -> None:
    function, args, fn = subject(name, side)
    with compiled_only(fn):
        batch, value = stacked(moved(args, seed)), scalar(function)
        outside = grad(lambda *own: vmap(value)(*own).sum(), argnums=everywhere(args))(*batch)
        inside = vmap(grad(value, argnums=everywhere(args)))(*batch)
        assert_same(outside, inside, **CLOSE)


@law()
def test_a_batch_is_its_samples_one_by_one(side: str, name: str, seed: int) -> None:
    function, args, fn = subject(name, side)
    with compiled_only(fn):
        batch = stacked(moved(args, seed))
        samples = [function(*(leaf[i] for leaf in batch)) for i in range(len(batch[0]))]
        one_by_one = torch_pytree.tree_map(lambda *rows: torch.stack(rows), *samples)
        assert_same(vmap(function)(*batch), one_by_one, **CLOSE)


@law()
def test_jvp_and_vjp_are_transposes(side: str, name: str, seed: int) -> None:
    function, args, fn = subject(name, side)
    with compiled_only(fn):
        args, tangents = moved(args, seed), waves(args, seed + 1)
        out, pushed = jvp(smooth(function), args, tangents)
        again, pull = vjp(smooth(function), *args)
        cotangents = waves(out, seed + 2)
        assert_same(again, out, **CLOSE)
        assert_same(inner(cotangents, pushed), inner(pull(cotangents), tangents), **CLOSE)


@law("in place")
def test_linearize_equals_jvp(side: str, name: str, seed: int) -> None:
    function, args, fn = subject(name, side)
    with compiled_only(fn):
        args = moved(args, seed)
        out, push = linearize(smooth(function), *args)
        for tangents in (waves(args, seed), waves(args, seed + 1)):
            assert_same((out, push(*tangents)), jvp(smooth(function), args, tangents), **CLOSE)


@law()
def test_both_modes_give_one_jacobian(side: str, name: str, seed: int) -> None:
    function, args, fn = subject(name, side)
    with compiled_only(fn):
        args = moved(args, seed)
        by_row, by_column = (mode(smooth(function), argnums=everywhere(args))(*args) for mode in (jacrev, jacfwd))
        assert_same(by_row, by_column, **CLOSE)


@law("batch statistics")
def test_a_hessian_is_symmetric(side: str, name: str, seed: int) -> None:
    function, args, fn = subject(name, side)
    with compiled_only(fn):
        args = moved(args, seed)
        blocks = hessian(scalar(function), argnums=everywhere(args))(*args)
        sizes = [leaf.numel() for leaf in args]
        rows = [[block.reshape(n, m) for block, m in zip(row, sizes, strict=True)] for row, n in zip(blocks, sizes)]  # noqa: B905
        whole = torch.cat([torch.cat(row, 1) for row in rows])
        assert whole.abs().sum() > 0
        assert_same(whole, whole.mT, **CLOSE)


@law("batch statistics", "solving")
def test_a_hessian_times_a_vector_is_the_same_both_ways(side: str, name: str, seed: int) -> None:
    function, args, fn = subject(name, side)
    with compiled_only(fn):
        args, tangents = moved(args, seed), waves(args, seed)
        slope = grad(scalar(function), argnums=everywhere(args))
        forward_over_reverse = jvp(slope, args, tangents)[1]
        reverse_over_reverse = vjp(slope, *args)[1](tangents)
        reverse_over_forward = grad(lambda *own: jvp(scalar(function), own, tangents)[1], everywhere(args))(*args)
        assert_same(forward_over_reverse, reverse_over_reverse, **CLOSE)
        assert_same(forward_over_reverse, reverse_over_forward, **CLOSE)
