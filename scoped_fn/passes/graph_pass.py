"""Graph passes: pure functions from graph to graph, how they combine, and those that read the state's constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx

from scoped_fn._errors import SpecError

GraphPass = Callable[[torch.fx.GraphModule], torch.fx.GraphModule]


class Absent:
    """What a constant is that was looked for and is not in the state."""

    def __repr__(self) -> str:
        return "ABSENT"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = Absent()


class ReadConstants(Mapping[str, Any]):
    """The constants of a state, as a pass sees them: it remembers which were read.

    Attributes:
        read: Name -> value of what was read; `ABSENT` for what was looked for and is not there.
    """

    def __init__(self, constants: Mapping[str, Any]) -> None:
        """Reads from `constants`."""
        self._constants = constants
        self.read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        self.read[name] = value = self._constants.get(name, ABSENT)
        if value is ABSENT:
            raise KeyError(
                f"Expected one of the state's constants ({', '.join(self._constants) or 'none'}), got {name!r}. "
                f"Set it: state = sf.set_constant(state, {name!r}, ...)."
            )
        return value

    def __iter__(self) -> Iterator[str]:
        raise TypeError("Expected constants to be read by name, got a loop over all of them. Write constants[name].")

    def __len__(self) -> int:
        raise TypeError("Expected constants to be read by name, got len() of all of them. Write constants[name].")


@dataclass(frozen=True)
class ConstantsPass:
    """A graph pass that reads the state's constants; what it read is recorded with the code.

    Attributes:
        function: `(gm, constants) -> gm`.
    """

    function: Callable[[torch.fx.GraphModule, Mapping[str, Any]], torch.fx.GraphModule]

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))

    def __call__(self, gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Refuses to run without constants."""
        raise SpecError(
            f"Expected constants for pass {self.__name__}, got none. Give it to a stage: stages.apply(state, ...)."
        )


def reads_constants(
    function: Callable[[torch.fx.GraphModule, Mapping[str, Any]], torch.fx.GraphModule],
) -> ConstantsPass:
    """Returns `(gm, constants) -> gm` as a graph pass that may read `state.constants`.

    The names that it reads, and those that it looks for in vain, are what its code depends on: `fn.constants`.

    Example:
        >>> @reads_constants
        ... def tensor_cores(gm, constants):
        ...     return gm if constants["cuda.capability"] < (8, 9) else gm
        >>> tensor_cores.__name__
        'tensor_cores'
    """
    check_pass(function)
    return ConstantsPass(function)


def run_pass(graph_pass: GraphPass, gm: torch.fx.GraphModule, constants: ReadConstants) -> torch.fx.GraphModule:
    """Returns what a pass makes of a graph, which it may edit."""
    return graph_pass.function(gm, constants) if isinstance(graph_pass, ConstantsPass) else graph_pass(gm)


def identity(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph as it is: the neutral element of `chain`."""
    return gm


def chain(*passes: GraphPass) -> GraphPass:
    """Returns the pass that applies the given ones from left to right; `chain()` is `identity`."""
    for given in passes:
        check_pass(given)
    kept = [p for p in passes if p is not identity]
    if len(kept) < 2:
        return kept[0] if kept else identity

    def chained(gm: torch.fx.GraphModule, constants: Any) -> torch.fx.GraphModule:
        for graph_pass in kept:
            gm = run_pass(graph_pass, gm, constants)
        return gm

    if any(isinstance(p, ConstantsPass) for p in kept):
        return ConstantsPass(chained)
    return lambda gm: chained(gm, None)


def check_pass(graph_pass: object, what: str = "pass") -> None:
    """Raises `SpecError` unless the object can be called."""
    if not callable(graph_pass):
        raise SpecError(f"Expected {what} to be a function (gm) -> gm, got {graph_pass!r}. Pass a function.")
