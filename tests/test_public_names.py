"""Every public name says what it is, and has a place in docs/."""

import inspect
import re

import pytest

import scoped_fn
import scoped_fn.state
from tests.source_rules.rooms import ROOT

CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
PUBLIC = sorted(
    {(room.__name__, name) for room in (scoped_fn, scoped_fn.state) for name in room.__all__},
)


def documented_words() -> frozenset[str]:
    """Every word that docs/ show as code."""
    pages = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("**/*.md")))
    return frozenset(re.findall(r"\w+", " ".join(CODE.findall(pages))))


def own_docstring(value: object) -> str | None:
    """The docstring written for a value: not inherited, and not the signature that dataclasses fill in."""
    text = vars(value).get("__doc__") if inspect.isclass(value) else getattr(value, "__doc__", None)
    written = text and not text.startswith(f"{getattr(value, '__name__', '')}(")
    return text if written else None


@pytest.mark.parametrize(("room", "name"), PUBLIC)
def test_public_name_has_a_docstring(room: str, name: str) -> None:
    value = getattr({"scoped_fn": scoped_fn, "scoped_fn.state": scoped_fn.state}[room], name)
    if not isinstance(value, str):
        assert own_docstring(value)


@pytest.mark.parametrize(("room", "name"), PUBLIC)
def test_public_name_has_a_place_in_the_docs(room: str, name: str) -> None:
    assert name in documented_words()
