"""The words of ``--schedule`` and ``--passes``: which profile-guided passes, and from which step on."""

from __future__ import annotations

import re
from dataclasses import dataclass

import scoped_fn as sf
from scoped_fn.demo.errors import UsageError
from scoped_fn.passes import GuidedPass, memory_budget, offload_saved, order_for_memory

NO_PASSES = "none"
PASS_WORDS = "memory_budget=F, order_for_memory or offload_saved=BYTES"
SIZE = re.compile(r"(?P<number>[0-9]+)(?P<unit>|KiB|MiB|GiB)")
UNITS = ("", "KiB", "MiB", "GiB")


@dataclass(frozen=True)
class NamedPasses:
    """Passes, and the words that asked for them.

    Attributes:
        words: For instance "memory_budget=0.5+order_for_memory"; "none" for no pass.
        passes: What `scoped_fn.compile` takes; empty for none.
    """

    words: str
    passes: tuple[GuidedPass, ...]


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule, and the words of its entries.

    Attributes:
        words: For each entry its passes, as in `NamedPasses`.
        schedule: What `scoped_fn.compile` takes.
    """

    words: tuple[str, ...]
    schedule: sf.Schedule


def parse_schedule(text: str) -> NamedSchedule:
    """Returns the schedule of a text such as ``0:none,50:memory_budget=0.5+order_for_memory``.

    Raises:
        UsageError: An entry is no ``step:passes``, or the steps do not rise.

    Example:
        >>> parse_schedule("0:none,50:memory_budget=0.5").words
        ('none', 'memory_budget=0.5')
    """
    entries = [_entry(word) for word in text.split(",")]
    try:
        schedule = sf.Schedule([(step, named.passes) for step, named in entries])
    except sf.SpecError as error:
        raise UsageError(str(error)) from None
    return NamedSchedule(tuple(named.words for _, named in entries), schedule)


def parse_passes(text: str) -> NamedPasses:
    """Returns the passes of a text such as ``memory_budget=0.5+order_for_memory``, or of ``none``.

    Raises:
        UsageError: A word is no pass, a value is not one that the pass takes, or a pass is there twice.
    """
    words = [word.strip() for word in text.split("+")]
    if words == [NO_PASSES]:
        return NamedPasses(NO_PASSES, ())
    passes = tuple(_guided_pass(word) for word in words)
    names = [word.partition("=")[0] for word in words]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise UsageError(f"Expected each pass once, got {repeated} {names.count(repeated)} times. Keep one of them.")
    return NamedPasses("+".join(words), passes)


def _entry(text: str) -> tuple[int, NamedPasses]:
    step, colon, passes = text.strip().partition(":")
    if not colon or re.fullmatch("[0-9]+", step) is None:
        raise UsageError(f"Expected step:passes, got {text!r}. Write for instance 0:none,50:memory_budget=0.5.")
    return int(step), parse_passes(passes)


def _guided_pass(word: str) -> GuidedPass:
    name, equals, value = word.partition("=")
    if name == "memory_budget" and equals:
        return memory_budget(_fraction(word, value))
    if name == "offload_saved" and equals:
        return offload_saved(_bytes(word, value))
    if word == "order_for_memory":
        return order_for_memory()
    advice = "Leave it alone" if word == NO_PASSES else "Join several with +, or write none"
    raise UsageError(f"Expected {PASS_WORDS}, got {word!r}. {advice}.")


def _fraction(word: str, value: str) -> float:
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise UsageError(f"Expected memory_budget=F with F from 0 to 1, got {word!r}. Write memory_budget=0.5.")
    return fraction


def _bytes(word: str, value: str) -> int:
    found = SIZE.fullmatch(value)
    if found is None:
        raise UsageError(
            f"Expected offload_saved=BYTES with a whole number, got {word!r}. Write offload_saved=65536, 64KiB or 4MiB."
        )
    return int(found["number"]) << 10 * UNITS.index(found["unit"])
