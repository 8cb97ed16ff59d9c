"""Files of older schemas are brought to the newest, step by step."""

from pathlib import Path
from typing import Any

import pytest

import scoped_fn as sf
from scoped_fn._checkpoint.header import SCHEMA
from scoped_fn._checkpoint.load import read
from scoped_fn._checkpoint.upgrade import UPGRADES
from tests.checkpoint.values import exact
from tests.state.whole import whole_state


def to_second(document: Any) -> Any:
    return [document, "second"]


def to_third(document: Any) -> Any:
    return [*document, "third"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    sf.save(whole_state(), tmp_path / "run")
    return tmp_path / "run"


def test_upgrades_are_made_in_order(path: Path) -> None:
    contents = read(path, newest=3, upgrades={2: to_third, 1: to_second})
    assert contents.schema == 1
    assert exact(contents.value) == exact([whole_state(), "second", "third"])


def test_the_newest_schema_needs_none(path: Path) -> None:
    assert exact(read(path, upgrades={1: to_second}).value) == exact(whole_state())


def test_a_step_that_is_missing(path: Path) -> None:
    with pytest.raises(sf.CheckpointError, match="Expected a schema that can be brought to 3, got 1 in"):
        read(path, newest=3, upgrades={1: to_second})


def fail(document: Any) -> Any:
    return document["nothing"]


def test_an_upgrade_that_a_document_does_not_suit(path: Path) -> None:
    """A forged file of an old schema is refused as one of the newest is."""
    with pytest.raises(sf.CheckpointError, match="Expected a document of schema 1, got 'KeyError: 'nothing''"):
        read(path, newest=2, upgrades={1: fail})
    with pytest.raises(sf.CheckpointError, match="Expected a kind of value that this version knows"):
        read(path, newest=2, upgrades={1: lambda document: {"a": document}})


def test_there_is_a_way_from_every_schema() -> None:
    assert sorted(UPGRADES) == list(range(1, SCHEMA))
