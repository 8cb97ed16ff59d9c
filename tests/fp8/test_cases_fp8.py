"""FP8 cases from public bug reports, driven through `Engine`: each passes, or refuses as the case allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.cases.casekit import Case, NotApplicable, check_eager, check_with
from tests.cases.open_cases import OPEN

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [case for case in OPEN if case.area == "fp8"]
WITH_INDUCTOR = [case for case in CASES if case.name in {"fp8_same_linear_called_twice", "fp8_nan_step_recovers"}]
ROLES = {"input": "x", "weight": "w", "grad_output": "g"}
Described = dict[str, dict[str, dict[str, Any]]]


def recipe_of(name: str, history: int) -> Any:
    """The recipe that a case calls by a short name."""
    recipes = {
        "current": sf.Float8CurrentScaling(),
        "delayed": sf.DelayedScaling(amax_history_len=history),
        "block": sf.Float8BlockScaling(),
        "mx": sf.MXFP8BlockScaling(),
    }
    return recipes[name]


def renamed(described: Described, names: dict[str, str]) -> Described:
    return {site: {names[role]: dict(one) for role, one in roles.items()} for site, roles in described.items()}


def as_tensors(described: Described, columns: tuple[tuple[str, str], ...], length: int) -> dict[str, torch.Tensor]:
    """A described state as an engine saves it: row 0 is staging, then the past, oldest first."""
    scales, rows = torch.ones(len(columns)), torch.zeros(length, len(columns))
    for index, (site, role) in enumerate(columns):
        one = described[site][role]
        scales[index] = one["scale"]
        rows[1:, index] = torch.tensor(one["history"][: length - 1]).flip(0)
    return {"fp8.scale": scales, "fp8.amax_history": rows}


class ScopedFp8:
    """A compiler of the case kit: an engine whose steps the case closes."""

    def __init__(self, backend: str) -> None:
        self.name, self.backend = f"scoped_fn.Engine[{backend}]", backend

    def __call__(
        self,
        model: Any,
        args: tuple = (),
        kwargs: dict | None = None,
        *,
        fp8: str = "current",
        history: int = 4,
        skip: tuple[str, ...] = (),
    ) -> Any:
        if not isinstance(model, nn.Module):
            raise NotApplicable("an engine is made of a module")
        engine = sf.Engine(model, tuple(args), kwargs, recipe=recipe_of(fp8, history), skip=skip, backend=self.backend)

        def run(*args: Any, **kwargs: Any) -> Any:
            return engine(*args, **kwargs)

        def load(described: Described) -> None:
            (held,) = engine.state.fp8.values()
            named = renamed(described, {short: role for role, short in ROLES.items()})
            engine.load_state_dict({**engine.state_dict(), **as_tensors(named, held.columns, history)})

        run.end_step = engine.end_step  # type: ignore[attr-defined]
        run.fp8_state = lambda: renamed(sf.describe_fp8(engine.state), ROLES)  # type: ignore[attr-defined]
        run.load_fp8_state = load  # type: ignore[attr-defined]
        return run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_agrees_with_the_case(case: Case) -> None:
    check_eager(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_eager_backend(case: Case) -> None:
    assert check_with(case, ScopedFp8("eager")) == []


@pytest.mark.parametrize("case", WITH_INDUCTOR, ids=lambda case: case.name)
def test_inductor(case: Case) -> None:
    assert check_with(case, ScopedFp8("inductor")) == []


def test_a_pattern_that_skips_no_layer_is_refused_with_the_layers() -> None:
    case = next(case for case in CASES if case.name == "fp8_resume_from_saved_state")
    with pytest.raises(sf.SpecError, match="fc"):
        ScopedFp8("eager")(*case.build(), fp8="delayed", skip=("lm_head",))
