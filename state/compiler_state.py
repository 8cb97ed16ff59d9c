"""`CompilerState`: the one value that changes, and how trees see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
import torch.utils._pytree as torch_pytree

from scoped_fn.state.autocast_scope import AutocastScope
from scoped_fn.state.fp8_state import Fp8State, from_tensors, tensors_of
from scoped_fn.state.frozen_dict import FrozenDict

NAMESPACE = "scoped_fn"
CHILDREN = ("buffers", "fp8", "key")

Buffers = Mapping[int, Mapping[str, torch.Tensor]]
Static = tuple[FrozenDict[int, "Owner"], int, tuple[AutocastScope, ...], FrozenDict[int, Any]]


@dataclass(frozen=True)
class Owner:
    """One compiled function that lives in a state.

    Attributes:
        name: What the owner is called in messages; the model's class by default.
        generation: How many times it was compiled again.
    """

    name: str
    generation: int = 0


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
    """

    owners: FrozenDict[int, Owner]
    next_token: int
    buffers: FrozenDict[int, FrozenDict[str, torch.Tensor]]
    key: torch.Tensor
    autocast: tuple[AutocastScope, ...] = ()
    fp8: FrozenDict[int, Fp8State] = field(default_factory=FrozenDict)

    def __repr__(self) -> str:
        lines = [f"CompilerState(key={_words(self.key)}, next_token={self.next_token}"]
        lines += [f"  autocast: {scope}" for scope in self.autocast]
        lines += [f"  owner {token}: {owner.name}{_owner_text(self, token)}" for token, owner in self.owners.items()]
        return "\n".join(lines) + ")"

    def __reduce__(self) -> tuple[Any, ...]:
        # torch cannot unpickle uint32 tensors (2.13), so the key travels as int64.
        key = self.key.to(torch.int64) if _is_key(self.key) else self.key
        return _from_parts, (self.owners, self.next_token, self.buffers, key, self.autocast, self.fp8)


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
    generation = state.owners[token].generation
    buffers: Mapping[str, torch.Tensor] = state.buffers.get(token, FrozenDict())
    shown = ", ".join(f"{name} {_leaf_text(leaf)}" for name, leaf in list(buffers.items())[:4])
    more = f", and {len(buffers) - 4} more" if len(buffers) > 4 else ""
    held = state.fp8.get(token)
    scales = f", FP8 scales {_leaf_text(held.scale)}, history {_leaf_text(held.amax_history)}" if held else ""
    buffers_text = f", buffers {shown}{more}" if buffers else ""
    return (f", generation {generation}" if generation else "") + buffers_text + scales


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)


def _flatten(state: CompilerState) -> tuple[tuple[Any, Any, Any], Static]:
    buffers = {token: dict(named) for token, named in state.buffers.items()}
    fp8 = {token: tensors_of(held) for token, held in state.fp8.items()}
    columns = FrozenDict({token: (held.columns, held.recipe) for token, held in state.fp8.items()})
    return (buffers, fp8, state.key), (state.owners, state.next_token, state.autocast, columns)


def _unflatten(static: Static, children: tuple[Buffers, Any, Any]) -> CompilerState:
    buffers, fp8, key = children
    frozen = FrozenDict({token: FrozenDict(named) for token, named in buffers.items()})
    scales = FrozenDict({token: from_tensors(static[3][token], tensors) for token, tensors in fp8.items()})
    return CompilerState(static[0], static[1], frozen, key, static[2], scales)


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
