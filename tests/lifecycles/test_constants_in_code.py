"""Constants that compiled code was made for: who reads them is compiled again, nobody else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import scoped_fn as sf
from tests.helpers import assert_same, fresh
from tests.lifecycles.graphs import passes_at, times

pytestmark = pytest.mark.usefixtures("one_thread")
X = torch.tensor([1.0, 2.0, 3.0])
LEVELS = ("captured", "joint", "forward", "backward")


def function(x: Tensor) -> Tensor:
    return (x * 3.0).tanh().sum()


@sf.passes.reads_constants
def scaled(gm: torch.fx.GraphModule, constants: Mapping[str, Any]) -> torch.fx.GraphModule:
    return times(constants["factor"], gm)


@sf.passes.reads_constants
def tuned(gm: torch.fx.GraphModule, constants: Mapping[str, Any]) -> torch.fx.GraphModule:
    """For a GPU of capability 10 and later; without any, as it is."""
    if "fast" in constants:
        return times(4.0, gm)
    return times(2.0, gm) if (constants.get("cuda.capability") or (0, 0)) >= (10, 0) else gm


def with_factor(value: float) -> sf.CompilerState:
    return sf.set_constant(sf.set_constant(sf.init_state(), "factor", value), "other", "never read")


def made(state: sf.CompilerState, passes: Any, **options: Any) -> tuple[sf.CompilerState, sf.CompiledFn]:
    return sf.compile(state, function, (fresh(X).requires_grad_(),), backend="eager", passes=passes, **options)


def value(state: sf.CompilerState, fn: sf.CompiledFn) -> float:
    return float(fn(state, fresh(X).requires_grad_())[1].detach())


PLAIN = float(function(X))


@pytest.mark.parametrize("level", LEVELS)
def test_a_function_lists_what_it_read_at_each_level(level: str) -> None:
    state, fn = made(with_factor(2.0), passes_at(level, scaled))
    assert fn.constants == {"factor": 2.0}
    _, other = made(state, sf.Passes())
    assert other.constants == {}


@pytest.mark.parametrize("level", LEVELS)
def test_another_value_compiles_the_reader_again_and_going_back_finds_the_old(level: str) -> None:
    state, fn = made(with_factor(2.0), passes_at(level, scaled))
    changed = sf.set_constant(state, "factor", 3.0)
    grads, graphs = [], []
    for one in (state, changed, state, changed):
        x = fresh(X).requires_grad_()
        fn(one, x)[1].backward()
        grads.append(x.grad)
        graphs.append(fn.cache_info().compiled_graphs)
    assert graphs == [2, 4, 4, 4]
    assert_same(grads[2:], grads[:2])
    if level in ("captured", "backward"):
        assert_same(grads[1] / 3, grads[0] / 2, rtol=1e-6)
    if level == "forward":
        assert value(changed, fn) / 3 == pytest.approx(value(state, fn) / 2)


def test_only_those_that_read_it_are_compiled_again() -> None:
    state, reader = made(with_factor(2.0), sf.Passes(captured=scaled))
    state, other = made(state, sf.Passes(captured=tuned))
    state, plain = made(state, sf.Passes())
    functions = (reader, other, plain)
    before = [fn.cache_info().captures for fn in functions]
    for name, new, expected in [
        ("other", "something else", [0, 0, 0]),
        ("factor", 5.0, [1, 0, 0]),
        ("cuda.capability", (10, 0), [1, 1, 0]),
        ("brand new", 1, [1, 1, 0]),
    ]:
        state = sf.set_constant(state, name, new)
        for fn in functions:
            value(state, fn)
        assert [fn.cache_info().captures - old for fn, old in zip(functions, before, strict=True)] == expected, name


def test_a_name_that_was_looked_for_in_vain_counts_once_it_is_there() -> None:
    state, fn = made(sf.init_state(), sf.Passes(captured=tuned))
    assert fn.constants == {"fast": sf.ABSENT, "cuda.capability": sf.ABSENT}
    assert value(state, fn) == pytest.approx(PLAIN)
    assert value(sf.set_constant(state, "fast", None), fn) == pytest.approx(4 * PLAIN), "there, whatever its value"
    fast = sf.set_constant(state, "cuda.capability", (10, 0))
    assert value(fast, fn) == pytest.approx(2 * PLAIN)
    assert value(sf.drop_constant(fast, "cuda.capability"), fn) == pytest.approx(PLAIN)
    assert fn.cache_info().captures == 3, "dropped again is as never set"


def test_a_constant_that_is_missing_or_dropped_is_the_passs_own_error() -> None:
    with pytest.raises(KeyError, match=r"Expected one of the state's constants \(none\), got 'factor'"):
        made(sf.init_state(), sf.Passes(captured=scaled))
    state, fn = made(with_factor(2.0), sf.Passes(captured=scaled))
    with pytest.raises(KeyError, match="factor"):
        value(sf.drop_constant(state, "factor"), fn)
    assert value(state, fn) == pytest.approx(2 * PLAIN)


@pytest.mark.parametrize("way", ["call", "value_and_grad", "inference"])
def test_a_stale_constant_raises_where_that_was_asked_for(way: str) -> None:
    def call(state: sf.CompilerState) -> Any:
        if way == "value_and_grad":
            return sf.value_and_grad(fn)(state, X)[1]
        return fn(state, fresh(X).requires_grad_(way == "call"))[1]

    state, fn = made(with_factor(2.0), sf.Passes(captured=scaled), on_stale="error")
    before = call(state)
    for stale in (sf.set_constant(state, "factor", 3.0), sf.drop_constant(state, "factor")):
        graphs = fn.cache_info().compiled_graphs
        with pytest.raises(sf.StaleConstant, match=r"Expected .*factor.*, got"):
            call(stale)
        assert fn.cache_info().compiled_graphs == graphs
    unread = sf.set_constant(state, "other", 0)
    assert_same(call(unread), before)
    _, fn = sf.recompile(sf.set_constant(state, "factor", 3.0), fn)
    assert fn.constants == {"factor": 3.0}
    assert issubclass(sf.StaleConstant, RuntimeError)
