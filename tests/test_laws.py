"""Every law of tests/generators/laws.py, for every generator that it names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.generators.laws import GENERATORS, LAWS, Law

PAIRS = [(law, of) for law in LAWS for of in law.of]


@pytest.mark.parametrize(("law", "of"), PAIRS, ids=[f"{law.name}: {of}" for law, of in PAIRS])
def test_law(law: Law, of: str) -> None:
    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(GENERATORS[of])
    def holds(value: Any) -> None:
        law.check(value)

    holds()


def test_every_law_has_a_name_of_its_own_and_every_generator_a_law() -> None:
    assert len({law.name for law in LAWS}) == len(LAWS)
    assert {of for law in LAWS for of in law.of} == set(GENERATORS)
