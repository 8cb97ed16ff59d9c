"""A state from JSON and tensors, with everything about it checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import torch

from scoped_fn._checkpoint.fp8_value import fp8_value
from scoped_fn._checkpoint.inputs_value import queue_value
from scoped_fn._checkpoint.plain import Document, pairs_of, plain_value
from scoped_fn._checkpoint.recipes import scope_value
from scoped_fn._checkpoint.unfit import demand, refusal
from scoped_fn._torch.config import PREFIXES
from scoped_fn.state import CompilerState, Fp8State, FrozenDict, Owner, init_state, set_constant

Take = Callable[[Document], torch.Tensor]

PARTS = frozenset(field.name for field in fields(CompilerState))
OWNER_FIELDS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "name": lambda value: isinstance(value, str),
        "generation": lambda value: is_count(value),
        "frames": lambda value: type(value) is tuple and all(map(is_count, value)),
        "next_frame": lambda value: is_count(value),
        "entry": lambda value: value is None or is_count(value),
        "settled": lambda value: type(value) is bool,
    }
)


def state_value(document: Document, take: Take) -> CompilerState:
    """Returns the state that JSON stands for.

    Args:
        document: As `state_document` gives it.
        take: Gives the tensor that a document stands for.

    Raises:
        Unfit: Something in it is not as in a state.
    """
    demand(
        isinstance(document, dict) and document.keys() == PARTS, f"a state with {', '.join(sorted(PARTS))}", document
    )
    following = document["next_token"]
    demand(is_count(following), "a next token", following)
    owners = _by_token(document["owners"], range(following), owner_value)
    return CompilerState(
        owners=owners,
        next_token=following,
        buffers=_by_token(document["buffers"], owners, lambda named: _buffers(named, take)),
        key=_key(take(document["key"])),
        autocast=tuple(scope_value(scope) for scope in _list(document["autocast"], "scopes")),
        fp8=FrozenDict(_fp8(document["fp8"], owners, take)),
        overrides=FrozenDict({_setting(k): _holders(v, owners) for k, v in _unique(document["overrides"], "settings")}),
        constants=_constants(document["constants"]),
        inputs=_by_token(document["inputs"], owners, lambda queue: queue_value(queue, take)),
    )


def owner_value(document: Document) -> Owner:
    """Returns the owner that JSON stands for."""
    well = isinstance(document, dict) and document.keys() == OWNER_FIELDS.keys()
    demand(well, f"an owner with {', '.join(OWNER_FIELDS)}", document)
    given = {name: plain_value(part) for name, part in document.items()}
    for name, check in OWNER_FIELDS.items():
        demand(check(given[name]), f"an owner's {name}", given[name])
    frames = given["frames"]
    rising = list(frames) == sorted(set(frames)) and all(index < given["next_frame"] for index in frames)
    demand(rising, f"open frames below {given['next_frame']}, each once", frames)
    return Owner(**given)


def is_count(value: Any) -> bool:
    """Returns whether a value is a whole number of at least 0, and no bool."""
    return type(value) is int and value >= 0


def _by_token(content: Any, known: Any, value: Callable[[Any], Any]) -> FrozenDict[int, Any]:
    pairs = _unique(content, "owners and what they have")
    return FrozenDict({_token(token, known): value(document) for token, document in pairs})


def _buffers(content: Any, take: Take) -> FrozenDict[str, torch.Tensor]:
    return FrozenDict({_name(name): take(document) for name, document in _unique(content, "buffers")})


def _token(token: Any, known: Any) -> int:
    demand(is_count(token) and token in known, "the token of an owner of this state", token)
    return int(token)


def _name(name: Any) -> str:
    demand(isinstance(name, str), "a name", name)
    return str(name)


def _list(content: Any, what: str) -> list[Any]:
    demand(isinstance(content, list), f"a list of {what}", content)
    return list(content)


def _unique(content: Any, what: str) -> list[tuple[Any, Any]]:
    """Returns pairs of different, plain keys."""
    pairs = pairs_of(content, what)
    keys = [key for key, _ in pairs]
    demand(all(type(key) in (int, str) for key in keys) and len(set(keys)) == len(keys), f"{what}, each once", keys)
    return pairs


def _key(tensor: torch.Tensor) -> torch.Tensor:
    try:
        init_state(key=tensor)
    except ValueError as error:
        raise refusal("a random key", str(error)) from None
    return tensor


def _fp8(content: Any, owners: Mapping[int, Owner], take: Take) -> dict[int, Fp8State]:
    made: dict[int, Fp8State] = {}
    for token, document in _unique(content, "owners and scales"):
        shared = document.get("same_as") if isinstance(document, dict) and len(document) == 1 else None
        demand(shared is None or (is_count(shared) and shared in made), "an owner before, with scales", document)
        made[_token(token, owners)] = fp8_value(document, take) if shared is None else made[shared]
    return made


def _setting(key: Any) -> str:
    demand(isinstance(key, str) and key.startswith(PREFIXES), "a setting of torch's compiler", key)
    return str(key)


def _holders(content: Any, owners: Mapping[int, Owner]) -> FrozenDict[int, Any]:
    pairs = _unique(content, "owners and values of a setting")
    demand(bool(pairs), "an owner for each setting", content)
    held = {_token(token, owners): plain_value(value) for token, value in pairs}
    for value in held.values():
        _check_hashable(value)
    return FrozenDict(held)


def _check_hashable(value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise refusal("a hashable value of a setting", value) from None


def _constants(content: Any) -> FrozenDict[str, Any]:
    state = init_state()
    for name, document in _unique(content, "constants"):
        try:
            state = set_constant(state, name, plain_value(document))
        except TypeError as error:
            raise refusal("a constant of plain data", str(error)) from None
    return state.constants
