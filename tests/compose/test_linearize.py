"""`torch.func.linearize` over a compiled function, and transforms over the linear function that it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.func import grad, jvp, linearize, vmap

from tests.compose.carried import energy
from tests.compose.case import Function, numbers, stateless
from tests.compose.quiet import QUIET
from tests.compose.trees import stacked, waves
from tests.helpers import assert_same, compiled

pytestmark = QUIET


def close(actual: Any, expected: Any) -> None:
    """Both trees are the same but for rounding."""
    assert_same(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_linearize_over_a_compiled_function(backend: str) -> None:
    args = numbers(3), numbers(3, seed=1)
    state, fn = compiled(energy, args, backend=backend)
    (out, push), (expected, twin_push) = linearize(stateless(fn, state), *args), linearize(energy, *args)
    close(out, expected)
    for seed in range(3):
        tangents = waves(args, seed)
        close(push(*tangents), twin_push(*tangents))
        close(push(*tangents), jvp(energy, args, tangents)[1])
    assert fn.cache_info().eager_calls == 0


LINEAR: dict[str, Callable[[Function, Any], Any]] = {
    "vmap": lambda push, args: vmap(push)(*stacked(waves(args))),
    "grad": lambda push, args: grad(push, argnums=(0, 1))(*waves(args)),
    "jvp": lambda push, args: jvp(push, waves(args), waves(args, 2)),
}


@pytest.mark.parametrize("over", LINEAR)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_transforms_over_what_linearize_gives(over: str, backend: str) -> None:
    args = numbers(3), numbers(3, seed=1)
    state, fn = compiled(energy, args, backend=backend)
    push, twin_push = linearize(stateless(fn, state), *args)[1], linearize(energy, *args)[1]
    close(LINEAR[over](push, args), LINEAR[over](twin_push, args))
