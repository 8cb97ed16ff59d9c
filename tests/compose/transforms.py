"""All transforms of the matrix, every one `(function, arguments) -> tree of tensors`, and which case meets which."""

from __future__ import annotations

from tests.compose.batching import BATCHING
from tests.compose.case import Case
from tests.compose.first_order import FIRST_ORDER
from tests.compose.functions import CASES
from tests.compose.second_order import SECOND_ORDER
from tests.compose.third_order import THIRD_ORDER
from tests.compose.transform import Meets, Transform

TRANSFORMS: tuple[Transform, ...] = (*FIRST_ORDER, *BATCHING, *SECOND_ORDER, *THIRD_ORDER)


def case_named(name: str) -> Case:
    """The case of this name."""
    return next(case for case in CASES if case.name == name)


def transform_named(name: str) -> Transform:
    """The transform of this name."""
    return next(one for one in TRANSFORMS if one.name == name)


def combinations() -> list[tuple[Case, Transform]]:
    """The cases with the transforms that are tried on them."""
    pairs = [
        (case, one, (row + column) % 3 == 0) for row, case in enumerate(CASES) for column, one in enumerate(TRANSFORMS)
    ]
    return [
        (case, one)
        for case, one, chosen in pairs
        if one.meets is Meets.EVERY or (case.deep if one.meets is Meets.DEEP else chosen)
    ]
