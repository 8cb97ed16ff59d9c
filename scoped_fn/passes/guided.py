"""Guided passes: passes made for one compile, some from a profile; and the check that a list of them fits together."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from scoped_fn._errors import SpecError
from scoped_fn.passes.levels import Passes, combine

if TYPE_CHECKING:
    from scoped_fn._profile import Profile

PROFILE = "profile"


class GuidedPass(ABC):
    """Something that makes `Passes` when a function is compiled. Make it a frozen dataclass: it is data in a schedule.

    Attributes:
        name: What lists and messages call it.
        requires: `"profile"`, or names of passes that must stand before it.
        conflicts: Names of passes that must not be in the same list.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def passes(self, profile: Profile | None) -> Passes:
        """Returns the passes; pure. The profile is complete, or None where `requires` does not name it."""


AnyPass = Passes | GuidedPass
Asked = tuple[AnyPass, ...]


def as_asked(passes: Any) -> Asked:
    """Returns `passes` of a compile as a tuple, checked.

    Raises:
        SpecError: Something else than `Passes` and guided passes, or ones that do not fit together.
    """
    every = tuple(passes) if isinstance(passes, Sequence) and not isinstance(passes, str) else (passes,)
    for each in every:
        if not isinstance(each, (Passes, GuidedPass)):
            raise SpecError(
                f"Expected passes as Passes, guided passes or a sequence of them, got {each!r}. "
                "Write sf.Passes(joint=my_pass), or [sf.passes.memory_budget(0.5)]."
            )
    _check_together(every)
    return every


def needs_profile(asked: Asked) -> bool:
    """Returns whether one of the passes is made from a profile."""
    return any(isinstance(each, GuidedPass) and PROFILE in each.requires for each in asked)


def resolve(asked: Asked, profile: Profile | None) -> Passes:
    """Returns the passes of one compile; without those that need a profile, with a warning, if it is not complete."""
    made: list[Passes] = []
    for each in asked:
        if isinstance(each, Passes):
            made.append(each)
        elif PROFILE not in each.requires or (profile is not None and profile.complete):
            made.append(_checked(each, each.passes(profile)))
        else:
            why = "none" if profile is None else f"one that is not: {profile.error}"
            warnings.warn(
                f"Expected a complete profile for the pass {each.name}, got {why}. The function is compiled without "
                "the pass; push inputs that it can run on, and recompile.",
                stacklevel=4,
            )
    return combine(made)


def unguided(asked: Asked) -> Passes:
    """Returns the passes that are no guided ones: what a profile is made under."""
    return combine([each for each in asked if isinstance(each, Passes)])


def _checked(guided: GuidedPass, made: Any) -> Passes:
    if not isinstance(made, Passes):
        raise SpecError(f"Expected {guided.name}.passes(profile) to return Passes, got a {type(made).__name__}.")
    return made


def _check_together(every: Asked) -> None:
    names = [_name(each) for each in every]
    for i, each in enumerate(every):
        if not isinstance(each, GuidedPass):
            continue
        for field in ("requires", "conflicts"):
            if not isinstance(getattr(each, field), (set, frozenset)):
                found = getattr(each, field)
                raise SpecError(f"Expected {field} of {each.name!r} as a set of names, got {found!r}. Write {{...}}.")
        missing = sorted(each.requires - {PROFILE} - set(names[:i]))
        if missing:
            raise SpecError(
                f"Expected {missing[0]!r} before {each.name!r}, got {names}. Put it into the list, earlier."
            )
        others = names[:i] + names[i + 1 :]
        clash = sorted(each.conflicts & set(others))
        if clash:
            raise SpecError(f"Expected {each.name!r} without {clash[0]!r}, got both. Leave one out.")
    if names.count("partition") > 1:
        raise SpecError("Expected one Passes(partition=...), got several. Leave one in.")


def _name(each: AnyPass) -> str:
    if isinstance(each, GuidedPass):
        name = getattr(each, "name", None)
        if not isinstance(name, str):
            raise SpecError(
                f"Expected {type(each).__name__} to have a name, got {name!r}. Write name: ClassVar[str] = ...."
            )
        return name
    return "partition" if each.partition is not None else "passes"
