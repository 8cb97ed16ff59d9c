"""`Plan`: how `compile` was asked to compile, so that later variants are made the same way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from scoped_fn._backends import Backend
from scoped_fn._schedule import Schedule
from scoped_fn.passes.guided import Asked, unguided
from scoped_fn.passes.levels import Passes
from scoped_fn.state import CompilerState, FrozenDict, init_state


@dataclass(frozen=True)
class Plan:
    """The options of one `compile`.

    Attributes:
        backend: What turns graphs into code.
        passes: What is applied, level by level.
        capture: "dynamo" or "trace".
        asked: The passes as they were asked for, guided ones among them.
        on_stale: "recompile" or "error": what happens where constants have changed that code read.
        base: The passes that hold where no entry of a schedule does.
        schedule: The `Schedule`, if there is one.
        entry: Which of its entries `asked` is.
        settings: What compiling depends on of the state of the call that is compiled for, see `settings_of`.
    """

    backend: Backend
    passes: Passes
    capture: str
    asked: Asked = ()
    on_stale: str = "recompile"
    base: Asked = ()
    schedule: Schedule | None = None
    entry: int | None = None
    settings: CompilerState = field(default_factory=init_state)

    @property
    def without_guided(self) -> Plan:
        """The plan without guided passes: what a profile is made under."""
        return replace(self, passes=unguided(self.asked))

    def seen_from(self, state: CompilerState, owner: int) -> Plan:
        """Returns the plan for a call with this state."""
        return replace(self, settings=settings_of(state, owner))


def settings_of(state: CompilerState, owner: int) -> CompilerState:
    """Returns a state with nothing in it but what compiling looks at: the owner, its overrides, the constants."""
    held = {key: holders for key, holders in state.overrides.items() if owner in holders}
    owners = {owner: state.owners[owner]} if owner in state.owners else {}
    return replace(init_state(), owners=FrozenDict(owners), overrides=FrozenDict(held), constants=state.constants)
