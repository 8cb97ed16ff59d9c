"""An immutable mapping, the container of every part of a `CompilerState`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(Mapping[K, V]):
    """A mapping that cannot change; `set` and `drop` give a new one.

    It compares by value and hashes when its values do. Keys keep the order in which they were first set.

    Example:
        >>> ages = FrozenDict({"ada": 36})
        >>> ages.set("alan", 41)
        FrozenDict({'ada': 36, 'alan': 41})
        >>> ages
        FrozenDict({'ada': 36})
    """

    __slots__ = ("_entries",)
    _entries: dict[K, V]

    def __init__(self, entries: Mapping[K, V] | None = None) -> None:
        """Copies `entries`."""
        object.__setattr__(self, "_entries", dict(entries or {}))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"Expected no change to a FrozenDict, got {name!r} set. Use .set(key, value) for a new one."
        )

    def __getitem__(self, key: K) -> V:
        return self._entries[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return f"FrozenDict({self._entries!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (self._entries,)

    def set(self, key: K, value: V) -> FrozenDict[K, V]:
        """Returns a mapping with `key` set to `value`."""
        return FrozenDict({**self._entries, key: value})

    def drop(self, key: K) -> FrozenDict[K, V]:
        """Returns a mapping without `key`; `KeyError` if it is not there."""
        rest = dict(self._entries)
        del rest[key]
        return FrozenDict(rest)
