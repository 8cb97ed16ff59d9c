"""Cases from public bug reports, driven through `compile`: each passes, or refuses as the case allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from scoped_fn.state import set_buffers
from tests.cases.casekit import EAGER, Case, NotApplicable, check_eager, check_with
from tests.cases.open_cases import OPEN

# The other areas (fp8, triton, jax) are about features that come later, each with tests of its own.
AREAS = {"torch.func", "buffers", "aliasing", "params", "inputs", "shapes", "dtype", "layout", "engines", "rng"}
CASES = [case for case in OPEN if case.area in AREAS]
WITH_INDUCTOR = [
    case
    for case in CASES
    if case.name
    in {
        "ema_update_under_no_grad",
        "expanded_output",
        "shared_submodule_two_paths",
        "kv_cache_buffer_replaced",
        "dict_and_kwargs_order",
        "empty_batch",
        "channels_last_conv",
        "rng_not_baked_in",
        "gan_two_backwards",
        "autocast_disabled_island",
    }
]


class ScopedFn:
    """Drives a case through `compile`, so that gradients and buffers land where eager puts them."""

    def __init__(self, backend: str, rng: str = "key") -> None:
        self.name = f"scoped_fn[{backend}]"
        self.backend, self.rng = backend, rng

    def __call__(self, model_or_fn: Any, args: tuple = (), kwargs: dict | None = None, **options: Any) -> Any:
        if options:
            raise NotApplicable("compile has no " + ", ".join(options))
        state, fn = sf.compile(sf.init_state(), model_or_fn, tuple(args), kwargs, backend=self.backend, rng=self.rng)

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal state
            if not isinstance(model_or_fn, nn.Module):
                state, out = fn(state, *args, **kwargs)
                return out
            state, out = _call_with_the_module_as_it_is(state, fn, model_or_fn, args, kwargs)
            return out

        return run


def _call_with_the_module_as_it_is(state: Any, fn: Any, module: nn.Module, args: tuple, kwargs: dict) -> Any:
    if module.training != fn.training:
        raise RuntimeError(
            f"Expected a module with training={fn.training}, the mode at compile, got {module.training}."
        )
    buffers = dict(module.named_buffers())
    state = set_buffers(state, fn.owner, {name: buffer.detach().clone() for name, buffer in buffers.items()})
    state, out = fn(state, dict(module.named_parameters()), *args, **kwargs)
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(state.buffers[fn.owner][name])
    return state, out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_eager_agrees_with_the_case_itself(case: Case) -> None:
    check_eager(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_eager_backend(case: Case) -> None:
    assert check_with(case, ScopedFn("eager", "torch" if case.area == "rng" else "key")) == []


@pytest.mark.parametrize("case", WITH_INDUCTOR, ids=lambda case: case.name)
def test_inductor(case: Case) -> None:
    assert check_with(case, ScopedFn("inductor", "torch" if case.area == "rng" else "key")) == []


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_random_case_with_keys_follows_the_key_as_eager_follows_the_seed(backend: str) -> None:
    (case,) = (case for case in OPEN if case.name == "rng_not_baked_in")
    function, (x,), _ = case.build()
    state, fn = sf.compile(sf.init_state(key=3), function, (x,), backend=backend)
    after, first = fn(state, x)
    _, second = fn(after, x)
    seeded = [fn(replace(state, key=sf.random.key(seed)), x)[1] for seed in (11, 11, 12)]
    assert not torch.equal(first, second)
    assert torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded[0], seeded[2])
    for drawn in (first, second, *seeded):
        assert set(drawn.tolist()) == {0.0, 2.0}
        assert 90 < (drawn == 0).sum() < 166


def test_the_parametrisation_leaves_no_area_out_by_accident() -> None:
    later = {"fp8", "triton", "jax"}
    of_the_state_itself = {"state"}  # tests/state/test_pytree.py::test_comparing_and_hashing_states_never_raises
    assert {case.area for case in OPEN} == AREAS | later | of_the_state_itself


def test_a_wrong_compiler_is_caught_by_the_cases() -> None:
    def forgets_gradients(model_or_fn: Any, args: tuple = (), kwargs: dict | None = None, **options: Any) -> Any:
        @torch.no_grad()
        def run(*args: Any, **kwargs: Any) -> Any:
            return EAGER(model_or_fn)(*args, **kwargs)

        return run

    forgets_gradients.name = "forgets gradients"  # type: ignore[attr-defined]
    caught = [case.name for case in CASES if check_with(case, forgets_gradients) != []]
    assert len(caught) > len(CASES) // 2
