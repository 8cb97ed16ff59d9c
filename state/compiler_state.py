"""`CompilerState`: the one value that changes, and how trees see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
import torch.utils._pytree as torch_pytree

from scoped_fn.state.autocast_scope import AutocastScope
from scoped_fn.state.exact import Aside, Exact
from scoped_fn.state.fp8_state import Fp8State, from_tensors, tensors_of
from scoped_fn.state.frozen_dict import FrozenDict
from scoped_fn.state.input_queue import InputQueue, queue_from, queue_static, queue_tensors

NAMESPACE = "scoped_fn"
CHILDREN = ("buffers", "fp8", "inputs", "key")

Buffers = Mapping[int, Mapping[str, torch.Tensor]]
Static = tuple[Any, ...]


@dataclass(frozen=True)
class Owner:
    """One compiled function that lives in a state.

    Attributes:
        name: What the owner is called in messages; the model's class by default.
        generation: How many times it was compiled again.
        frames: Indices of its open frames: forwards whose backward is still to come.
        next_frame: The index of the next one.
        entry: The entry of its schedule that is in force, if it has one.
        settled: Whether a function was compiled for it.
    """

    name: str
    generation: int = 0
    frames: tuple[int, ...] = ()
    next_frame: int = 0
    entry: int | None = None
    settled: bool = False

    def __str__(self) -> str:
        parts = [f"generation {self.generation}"] if self.generation else []
        parts += [f"schedule entry {self.entry}"] if self.entry is not None else []
        parts += [f"open frames {', '.join(map(str, self.frames))}"] if self.frames else []
        return ", ".join([self.name, *parts])


@dataclass(frozen=True, eq=False)
class CompilerState:
    """Everything that changes while models are compiled and trained; immutable.

    A pytree in optree (namespace `"scoped_fn"`) and in torch: its leaves are the tensors, the rest is structure.
    Compare two states with `tree_equal`.

    Attributes:
        owners: Token -> `Owner`. Static.
        next_token: The token that the next `acquire` hands out; never goes back. Static.
        buffers: Token -> module buffers by name, each of the buffer's own shape and dtype.
        key: Random key, shape [2], uint32: the words of a JAX threefry key, high word first.
        autocast: The open scopes of FP8 autocast, the innermost last. Static.
        fp8: Token -> scales and amax history, of the owners that scale by history.
        overrides: Setting of torch -> token -> value. Static.
        constants: Facts of the outside world by name. Static.
        inputs: Token -> queued inputs.
    """

    owners: FrozenDict[int, Owner]
    next_token: int
    buffers: FrozenDict[int, FrozenDict[str, torch.Tensor]]
    key: torch.Tensor
    autocast: tuple[AutocastScope, ...] = ()
    fp8: FrozenDict[int, Fp8State] = field(default_factory=FrozenDict)
    overrides: FrozenDict[str, FrozenDict[int, Any]] = field(default_factory=FrozenDict)
    constants: FrozenDict[str, Any] = field(default_factory=FrozenDict)
    inputs: FrozenDict[int, InputQueue] = field(default_factory=FrozenDict)

    def __repr__(self) -> str:
        lines = [f"CompilerState(key={_words(self.key)}, next_token={self.next_token}"]
        lines += [f"  autocast: {scope}" for scope in self.autocast]
        lines += [f"  constant {name}: {value!r}" for name, value in self.constants.items()]
        lines += [f"  owner {token}: {owner}{_owner_text(self, token)}" for token, owner in self.owners.items()]
        return "\n".join(lines) + ")"

    def __reduce__(self) -> tuple[Any, ...]:
        # torch cannot unpickle uint32 tensors (2.13), so the key travels as int64.
        key = self.key.to(torch.int64) if _is_key(self.key) else self.key
        rest = (self.autocast, self.fp8, self.overrides, self.constants, self.inputs)
        return _from_parts, (self.owners, self.next_token, self.buffers, key, *rest)


def init_state(*, key: int | torch.Tensor = 0) -> CompilerState:
    """Returns an empty state.

    Args:
        key: A seed, 0 <= seed < 2**64, or the two uint32 words of a JAX threefry key as a tensor of shape [2].

    Raises:
        ValueError: The seed is out of range or the tensor is no key.

    Example:
        >>> init_state(key=7)
        CompilerState(key=(0, 7), next_token=0)
    """
    return CompilerState(FrozenDict(), 0, FrozenDict(), _key_tensor(key))


def _key_tensor(key: int | torch.Tensor) -> torch.Tensor:
    if isinstance(key, torch.Tensor):
        if key.shape != (2,) or key.dtype != torch.uint32:
            raise ValueError(
                f"Expected a key of shape [2] and dtype uint32, got {list(key.shape)} and {key.dtype}. "
                "Pass an integer seed, or the two words of a JAX key."
            )
        return key.detach().clone()
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 2**64:
        raise ValueError(f"Expected a seed 0 <= seed < 2**64, got {key!r}. Pass an integer, for example key=0.")
    return torch.tensor([key >> 32, key & 0xFFFFFFFF], dtype=torch.uint32)


def _is_key(key: Any) -> bool:
    return isinstance(key, torch.Tensor) and key.dtype == torch.uint32


def _from_parts(owners: Any, next_token: int, buffers: Any, key: Any, *rest: Any) -> CompilerState:
    whole = isinstance(key, torch.Tensor) and key.dtype == torch.int64
    return CompilerState(owners, next_token, buffers, key.to(torch.uint32) if whole else key, *rest)


def _words(key: Any) -> Any:
    return tuple(key.tolist()) if isinstance(key, torch.Tensor) and key.shape == (2,) else key


def _owner_text(state: CompilerState, token: int) -> str:
    buffers: Mapping[str, torch.Tensor] = state.buffers.get(token, FrozenDict())
    shown = ", ".join(f"{name} {_leaf_text(leaf)}" for name, leaf in list(buffers.items())[:4])
    more = f", and {len(buffers) - 4} more" if len(buffers) > 4 else ""
    text = f", buffers {shown}{more}" if buffers else ""
    held = state.fp8.get(token)
    text += f", FP8 scales {_leaf_text(held.scale)}, history {_leaf_text(held.amax_history)}" if held else ""
    overrides = [f"{key}={holders[token]!r}" for key, holders in state.overrides.items() if token in holders]
    text += f", overrides {', '.join(overrides)}" if overrides else ""
    queued = len(state.inputs[token].entries) if token in state.inputs else 0
    return text + (f", inputs of {queued} calls" if queued else "")


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)


def _sorted(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: named[name] for name in sorted(named)}


def _in_order(named: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: named[name] for name in names}


def _flatten(state: CompilerState) -> tuple[tuple[Any, ...], Static]:
    # Sorted, as optree and JAX sort keys and torch does not: leaves have one order in all three.
    buffers = {token: _sorted(state.buffers[token]) for token in sorted(state.buffers)}
    fp8 = {token: tensors_of(state.fp8[token]) for token in sorted(state.fp8)}
    inputs = {token: queue_tensors(state.inputs[token]) for token in sorted(state.inputs)}
    columns = FrozenDict({token: (held.columns, held.recipe) for token, held in state.fp8.items()})
    queues = FrozenDict({token: queue_static(queue) for token, queue in state.inputs.items()})
    settings = Exact(state.overrides), Exact(state.constants)
    order = Aside({token: tuple(named) for token, named in state.buffers.items()})  # the model's own, for readers
    static = (state.owners, state.next_token, state.autocast, columns, *settings, queues, order)
    return (buffers, fp8, inputs, state.key), static


def _unflatten(static: Static, children: tuple[Any, ...]) -> CompilerState:
    owners, next_token, autocast, columns, overrides, constants, queues, order = static
    buffers, fp8, inputs, key = children
    return CompilerState(
        owners=owners,
        next_token=next_token,
        buffers=FrozenDict({token: FrozenDict(_in_order(buffers[token], order.value[token])) for token in order.value}),
        key=key,
        autocast=autocast,
        fp8=FrozenDict({token: from_tensors(columns[token], tensors) for token, tensors in fp8.items()}),
        overrides=overrides.value,
        constants=constants.value,
        inputs=FrozenDict({token: queue_from(queues[token], tensors) for token, tensors in inputs.items()}),
    )


def _flatten_with_keys(state: CompilerState) -> tuple[list[tuple[Any, Any]], Static]:
    children, static = _flatten(state)
    return [(torch_pytree.GetAttrKey(name), child) for name, child in zip(CHILDREN, children, strict=True)], static


optree.register_pytree_node(
    CompilerState,  # type: ignore[arg-type]
    lambda state: (*_flatten(state), CHILDREN),  # type: ignore[arg-type]
    _unflatten,  # type: ignore[arg-type]
    namespace=NAMESPACE,
)
torch_pytree.register_pytree_node(
    CompilerState,
    lambda state: (list(_flatten(state)[0]), _flatten(state)[1]),
    lambda children, static: _unflatten(static, tuple(children)),
    serialized_type_name="scoped_fn.state.CompilerState",
    flatten_with_keys_fn=_flatten_with_keys,
)
