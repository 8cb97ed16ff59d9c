"""Operations on a state, as values: each can be applied to any state, alone or as one of a sequence.

`tests/lifecycles/histories_machine.py` runs the same operations against a model of what they must do; here they only
make states, and are the subjects of laws that hold for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

import scoped_fn as sf
from scoped_fn.state.fp8_state import init_fp8
from tests.generators.trees import TENSORS

AUTOTUNE = "torch._inductor.config.max_autotune"
LIMIT = "torch._dynamo.config.recompile_limit"
MOST_OWNERS = 4
MOST_OPERATIONS = 14


@dataclass(frozen=True)
class Operation:
    """One operation, with all of its arguments but the state.

    Attributes:
        name: What it is called in reports.
        pick: A number that says which owner it is about, among those that there are.
        arguments: What else it takes.
    """

    name: str
    pick: int
    arguments: tuple[Any, ...] = ()

    def __call__(self, state: sf.CompilerState) -> sf.CompilerState:
        """Returns the next state: the very same one where the operation has nothing to act on."""
        owners = sorted(state.owners)
        if self.name in OF_AN_OWNER:
            return OF_AN_OWNER[self.name](state, owners[self.pick % len(owners)], *self.arguments) if owners else state
        return OF_NOBODY[self.name](state, *self.arguments)


def acquire(state: sf.CompilerState, name: str) -> sf.CompilerState:
    return sf.acquire(state, name)[0] if len(state.owners) < MOST_OWNERS else state


def close_frame(state: sf.CompilerState, owner: int, which: int) -> sf.CompilerState:
    frames = state.owners[owner].frames
    return sf.close_frame(state, sf.Frame(owner, frames[which % len(frames)])) if frames else state


def drop_override(state: sf.CompilerState, owner: int, key: str) -> sf.CompilerState:
    return sf.drop_override(state, owner, key) if key in sf.overrides_of(state, owner) else state


def take_inputs(state: sf.CompilerState, owner: int) -> sf.CompilerState:
    return sf.take_inputs(state, owner)[0] if owner in state.inputs else state


def add_fp8(state: sf.CompilerState, owner: int, history: int) -> sf.CompilerState:
    recipe = sf.DelayedScaling(amax_history_len=history)
    return replace(state, fp8=state.fp8.set(owner, init_fp8([("0", "input"), ("0", "grad_output")], recipe)))


def drop_constant(state: sf.CompilerState, name: str) -> sf.CompilerState:
    return sf.drop_constant(state, name) if name in state.constants else state


def end_autocast(state: sf.CompilerState) -> sf.CompilerState:
    return sf.end_autocast(state) if state.autocast else state


OF_AN_OWNER: dict[str, Callable[..., sf.CompilerState]] = {
    "release": sf.release,
    "set_buffers": sf.set_buffers,
    "set_override": sf.set_override,
    "drop_override": drop_override,
    "open_frame": lambda state, owner: sf.open_frame(state, owner)[0],
    "close_frame": close_frame,
    "push_inputs": sf.push_inputs,
    "take_inputs": take_inputs,
    "add_fp8": add_fp8,
}
OF_NOBODY: dict[str, Callable[..., sf.CompilerState]] = {
    "acquire": acquire,
    "autocast": sf.autocast,
    "end_autocast": end_autocast,
    "set_constant": sf.set_constant,
    "drop_constant": drop_constant,
    "update_scales": sf.update_scales,
    "next_key": lambda state: sf.next_key(state)[0],
}

NAMES = st.sampled_from(["encoder", "decoder", ""])
PLAIN = st.sampled_from([1, True, None, "a", (10, 0), 2.5])
RECIPES = st.sampled_from([sf.DelayedScaling(), sf.Float8CurrentScaling(), sf.MXFP8BlockScaling()])
BUFFERS = st.dictionaries(st.sampled_from(["mean", "norm.count", "m"]), TENSORS, max_size=2)
SETTINGS = st.one_of(st.tuples(st.just(AUTOTUNE), st.booleans()), st.tuples(st.just(LIMIT), st.integers(1, 3)))
INPUTS = st.lists(st.one_of(TENSORS, st.just(3), st.dictionaries(st.just("x"), TENSORS)), max_size=2).map(tuple)

ARGUMENTS: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    "acquire": st.tuples(NAMES),
    "autocast": st.tuples(RECIPES),
    "set_constant": st.tuples(st.sampled_from(["rank", "ub.fp8"]), PLAIN),
    "drop_constant": st.tuples(st.sampled_from(["rank", "ub.fp8"])),
    "set_buffers": st.tuples(BUFFERS),
    "set_override": SETTINGS,
    "drop_override": st.tuples(st.sampled_from([AUTOTUNE, LIMIT])),
    "close_frame": st.tuples(st.integers(0, 3)),
    "push_inputs": st.tuples(INPUTS),
    "add_fp8": st.tuples(st.integers(1, 4)),
}


def operation(name: str) -> st.SearchStrategy[Operation]:
    """One operation of a name, with arguments."""
    return st.builds(Operation, st.just(name), st.integers(0, MOST_OWNERS - 1), ARGUMENTS.get(name, st.just(())))


ALL_NAMES = sorted(OF_AN_OWNER | OF_NOBODY)
# One of each: of sampled names some never come up in a hundred examples.
OPERATIONS = st.tuples(*map(operation, ALL_NAMES))
# Without owners most operations have nothing to act on.
HISTORIES = st.builds(
    lambda first, rest, length: [*first, *rest[:length]],
    st.lists(operation("acquire"), min_size=1, max_size=2),
    st.permutations(2 * ALL_NAMES).flatmap(lambda names: st.tuples(*map(operation, names[:MOST_OPERATIONS]))),
    st.integers(0, MOST_OPERATIONS),
)


def run(state: sf.CompilerState, history: list[Operation]) -> sf.CompilerState:
    """The state after a sequence of operations."""
    for one in history:
        state = one(state)
    return state


SEEDS = st.one_of(st.sampled_from([0, 2**64 - 1]), st.integers(0, 2**64 - 1))
STATES = st.builds(lambda seed, history: run(sf.init_state(key=seed), history), SEEDS, HISTORIES)


def twin_of(state: sf.CompilerState) -> sf.CompilerState:
    """An equal state of tensors of its own."""
    twin: sf.CompilerState = sf.state.tree_map(torch.clone, state)
    return twin
