"""Every transform over every compiled case equals eager, runs nothing eager, and compiles once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.compose.case import Arguments, Case, Function, compiled_call, eager_call, over_differentiable, twin_call
from tests.compose.functions import CASES
from tests.compose.quiet import QUIET
from tests.compose.transform import Transform, refusal
from tests.compose.transforms import TRANSFORMS, combinations
from tests.helpers import assert_same, process_unchanged, tensors, unchanged

pytestmark = QUIET

WORKING = [(case, one) for case, one in combinations() if refusal(case, one) is None]
REFUSED = [(case, one) for case, one in combinations() if refusal(case, one) is not None]
# What torch itself raises for something it cannot differentiate or batch; NotImplementedError is a RuntimeError.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError)


def over(pairs: list[tuple[Case, Transform]]) -> Callable[[Any], Any]:
    """Runs a test for each pair."""
    names = [f"{case.name}-{one.name}" for case, one in pairs]
    return pytest.mark.parametrize(("case", "transform"), pairs, ids=names)


@functools.cache
def subject(case: Case) -> tuple[Function, Arguments, sf.CompiledFn]:
    """The compiled case as a function of what is differentiable, its arguments, and what it did so far."""
    call, fn = compiled_call(case)
    return *over_differentiable(case, call), fn


def by_twin(case: Case, transform: Transform) -> list[Any]:
    """The result by the case's twin, or nothing if there is no twin."""
    twin = twin_call(case)
    return [] if twin is None else [transform.apply(*over_differentiable(case, twin))]


def check_equal(actual: Any, accepted: list[Any], case: Case, what: str) -> None:
    """The result equals one of those that are accepted."""
    failures: list[str] = []
    for expected in accepted:
        try:
            return assert_same(actual, expected, rtol=case.rtol, atol=case.rtol / 100, what=what)
        except AssertionError as error:
            failures.append(str(error))
    raise AssertionError("\n".join(failures))


def check_nothing_left() -> None:
    """No transform is still on."""
    assert torch._C._functorch.peek_interpreter_stack() is None


def check_plain(result: Any) -> None:
    """The tensors of a result are out of every transform and off every graph."""
    for tensor in tensors(result):
        assert not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        assert torch.autograd.forward_ad._current_level < 0
        assert not tensor.requires_grad


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_oracle_side_runs(case: Case) -> None:
    function, args = over_differentiable(case, eager_call(case))
    for one in [one for paired, one in WORKING if paired is case]:
        with unchanged(args):
            result = one.apply(function, args)
        assert tensors(result), f"{one.name} gives nothing to compare"
        check_plain(result)
        assert all(tensor.isfinite().all() for tensor in tensors(result)), one.name
        check_equal(one.apply(function, args), [result], case, f"{one.name}, again")


@over(REFUSED)
def test_eager_raises_where_the_case_says_so(case: Case, transform: Transform) -> None:
    # An AssertionError: torch's own, from forward mode over vmap over a custom function.
    with pytest.raises((*REFUSALS, AssertionError)):
        transform.apply(*over_differentiable(case, eager_call(case)))


@pytest.mark.parametrize("case", [case for case in CASES if case.twin], ids=lambda case: case.name)
def test_a_twin_equals_eager_where_eager_is_right(case: Case) -> None:
    right = [one for paired, one in WORKING if paired is case and one.name not in case.eager_wrong]
    for one in right:
        expected = one.apply(*over_differentiable(case, eager_call(case)))
        check_equal(by_twin(case, one)[0], [expected], case, one.name)


@over(WORKING)
def test_it_equals_eager_and_stays_compiled(case: Case, transform: Transform) -> None:
    accepted = [transform.apply(*over_differentiable(case, eager_call(case)))]
    if transform.name in case.eager_wrong:
        accepted += by_twin(case, transform)
    function, args, fn = subject(case)
    eager_calls = fn.cache_info().eager_calls
    with process_unchanged(), unchanged(args):
        actual = transform.apply(function, args)
    check_nothing_left()
    check_plain(actual)
    check_equal(actual, accepted, case, transform.name)
    first = fn.cache_info()
    assert first.eager_calls == eager_calls, "something ran eager"
    check_equal(transform.apply(function, args), [actual], case, f"{transform.name}, again")
    second = fn.cache_info()
    assert second._replace(compiled_calls=0) == first._replace(compiled_calls=0), "the second run made something new"
    assert second.compiled_calls > first.compiled_calls


@over(REFUSED)
@pytest.mark.filterwarnings("ignore:Expected .* to stay compiled:UserWarning")
def test_what_eager_refuses_is_refused_or_right(case: Case, transform: Transform) -> None:
    function, args, _ = subject(case)
    with process_unchanged(), unchanged(args):
        try:
            result = transform.apply(function, args)
        except REFUSALS as error:
            assert str(error), "an error says what it is about"
            result = None
    check_nothing_left()
    if result is not None:  # where there is no twin, nothing to compare with: the result must still be one
        check_plain(result)
        assert tensors(result)
        assert all(tensor.isfinite().all() for tensor in tensors(result))
        if case.twin:
            check_equal(result, by_twin(case, transform), case, transform.name)


def test_the_lists_are_as_long_as_they_say() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 24
    assert len({one.name for one in TRANSFORMS}) == len(TRANSFORMS) >= 24
    known = {one.name for one in TRANSFORMS}.union(*(one.tags for one in TRANSFORMS))
    for case in CASES:
        reasons = {**case.eager_cannot, **case.eager_wrong}
        assert set(reasons) <= known, f"{case.name}: an unknown name"
        assert all(reasons.values()), f"{case.name}: a reason is missing"
        assert case.twin or not case.eager_wrong, f"{case.name}: what is right, if eager is not?"
    tried = {one.name for _, one in WORKING}
    assert tried == {one.name for one in TRANSFORMS}
