"""Every public name says what it is, and has a place in docs/."""

import importlib
import inspect
import re
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from tests.source_rules.rooms import ROOT

FACES = (
    "scoped_fn",
    "scoped_fn.state",
    "scoped_fn.stages",
    "scoped_fn.passes",
    "scoped_fn.kernels",
    "scoped_fn.interop",
)
PUBLIC = [(face, name) for face in FACES for name in importlib.import_module(face).__all__]
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def words_in_code(page: str) -> frozenset[str]:
    """Every word that a page shows as code."""
    return frozenset(re.findall(r"\w+", " ".join(CODE.findall(page))))


def own_docstring(value: object) -> str | None:
    """The docstring written for a value: not inherited, and not the signature that dataclasses fill in."""
    text = vars(value).get("__doc__") if inspect.isclass(value) else getattr(value, "__doc__", None)
    written = text and not text.startswith(f"{getattr(value, '__name__', '')}(")
    return text if written else None


@pytest.mark.parametrize(("face", "name"), PUBLIC)
def test_public_name_has_a_docstring(face: str, name: str) -> None:
    value = getattr(importlib.import_module(face), name)
    # An alias of a type has nowhere to keep a docstring.
    if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
        assert own_docstring(value)


@pytest.mark.parametrize(("face", "name"), PUBLIC)
def test_public_name_has_a_place_in_the_docs(face: str, name: str) -> None:
    pages = [path.read_text() for path in (ROOT / "docs").glob("**/*.md")]
    assert any(name in words_in_code(page) for page in pages)


def test_only_words_in_code_count() -> None:
    page = "Compile it, then `release(state)`.\n\n```python\nacquire(state)\n```\nThat is all.\n"
    assert words_in_code(page) == {"release", "state", "python", "acquire"}


def test_a_docstring_that_nobody_wrote_does_not_count() -> None:
    class Base:
        """Says something."""

    class Derived(Base): ...

    @dataclass
    class Data:
        field: int

    class Pair(NamedTuple):
        field: int

    assert own_docstring(Base) == "Says something."
    assert [own_docstring(value) for value in (Derived, Data, Pair, lambda: None)] == [None] * 4
