"""The tensors of a state by readable names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from scoped_fn._checkpoint.dtypes import described_tensor
from scoped_fn._errors import SpecError
from scoped_fn._state_check import check_state
from scoped_fn.state import CompilerState, Fp8State, FrozenDict, InputQueue

FP8_TENSORS = ("scale", "amax_history", "grad_sink")


def to_tensors(state: CompilerState) -> dict[str, torch.Tensor]:
    """Returns copies of a state's tensors by name, which is all of it that steps with one program change in value.

    Names are `key`, `buffers.OWNER.NAME`, `fp8.OWNER.scale` (and `amax_history`, `grad_sink`), and
    `inputs.OWNER.entries.CALL.INDEX` or `inputs.OWNER.spec.INDEX` of queued inputs. Owners that share their scales have
    them once, under the first. It is what `torch.distributed.checkpoint` saves and loads into; as it loads in place,
    the tensors share no memory with the state.

    Args:
        state: Any state.

    Returns:
        Name -> tensor of the leaf's own shape, dtype and device; without a gradient.

    Raises:
        TypeError: The state holds arrays of JAX.

    Example:
        >>> import scoped_fn as sf
        >>> state, owner = sf.acquire(sf.init_state(key=7), "encoder")
        >>> state = sf.set_buffers(state, owner, {"mean": torch.zeros(2)})
        >>> to_tensors(state)
        {'key': tensor([0, 7], dtype=torch.uint32), 'buffers.0.mean': tensor([0., 0.])}
    """
    check_state(state)
    leaves = dict(named_leaves(state))
    strange = next((name for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)), None)
    if strange is not None:
        raise TypeError(
            f"Expected a state of tensors, got {type(leaves[strange]).__name__} as {strange}. "
            "Convert the state first with interop.jax_to_torch."
        )
    return {name: _copied(tensor) for name, tensor in leaves.items()}


def from_tensors(state: CompilerState, tensors: Mapping[str, torch.Tensor]) -> CompilerState:
    """Returns the state with these tensors in place of its own.

    Args:
        state: A state of the same program: owners, columns of scales and queued inputs stay as they are in it.
        tensors: As `to_tensors` gives them: the same names, shapes and dtypes. They are copied, and stay on their
            devices.

    Raises:
        SpecError: Names are missing or unknown, or a shape or dtype differs.

    Example:
        >>> import scoped_fn as sf
        >>> from_tensors(sf.init_state(), to_tensors(sf.init_state(key=7)))
        CompilerState(key=(0, 7), next_token=0)
    """
    check_state(state)
    leaves = dict(named_leaves(state))
    _check_names(leaves, tensors)
    for name, leaf in leaves.items():
        _check_leaf(name, leaf, tensors[name])
    return with_leaves(state, {name: _copied(tensors[name]) for name in leaves})


def named_leaves(state: CompilerState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each leaf of a state with its name, those that owners share once."""
    yield "key", state.key
    for token, named in state.buffers.items():
        yield from ((f"buffers.{token}.{name}", tensor) for name, tensor in named.items())
    first = sharing(state)
    for token, held in state.fp8.items():
        if first[token] == token:
            yield from ((f"fp8.{token}.{name}", getattr(held, name)) for name in FP8_TENSORS)
    for token, queue in state.inputs.items():
        yield from ((f"inputs.{token}.{name}", tensor) for name, tensor in _named_inputs(queue))


def sharing(state: CompilerState) -> dict[int, int]:
    """Returns, for each owner with FP8 scales, the first that has the very same ones, as the modes of an engine do."""
    first: dict[Any, int] = {}
    return {token: first.setdefault(_identity(held), token) for token, held in state.fp8.items()}


def with_leaves(state: CompilerState, leaves: Mapping[str, torch.Tensor]) -> CompilerState:
    """Returns the state with these leaves by name."""
    buffers = {
        token: FrozenDict({name: leaves[f"buffers.{token}.{name}"] for name in named})
        for token, named in state.buffers.items()
    }
    fp8: dict[int, Fp8State] = {}
    first = sharing(state)
    for token, held in state.fp8.items():
        fp8[token] = fp8.get(first[token]) or _with_scales(held, f"fp8.{token}", leaves)
    inputs = {token: _with_inputs(queue, f"inputs.{token}", leaves) for token, queue in state.inputs.items()}
    return replace(
        state, key=leaves["key"], buffers=FrozenDict(buffers), fp8=FrozenDict(fp8), inputs=FrozenDict(inputs)
    )


def _with_scales(held: Fp8State, prefix: str, leaves: Mapping[str, torch.Tensor]) -> Fp8State:
    scale, amax_history, grad_sink = (leaves[f"{prefix}.{name}"] for name in FP8_TENSORS)
    return replace(held, scale=scale, amax_history=amax_history, grad_sink=grad_sink)


def _named_inputs(queue: InputQueue) -> Iterator[tuple[str, torch.Tensor]]:
    for call, entry in enumerate(queue.entries):
        yield from ((f"entries.{call}.{index}", tensor) for index, tensor in enumerate(entry.tensors))
    yield from ((f"spec.{index}", tensor) for index, tensor in enumerate(queue.spec.values))


def _with_inputs(queue: InputQueue, prefix: str, leaves: Mapping[str, torch.Tensor]) -> InputQueue:
    entries = tuple(
        replace(entry, tensors=tuple(leaves[f"{prefix}.entries.{call}.{index}"] for index in range(len(entry.tensors))))
        for call, entry in enumerate(queue.entries)
    )
    values = tuple(leaves[f"{prefix}.spec.{index}"] for index in range(len(queue.spec.values)))
    return InputQueue(entries, replace(queue.spec, values=values))


def _identity(held: Fp8State) -> tuple[Any, ...]:
    return held.columns, held.recipe, *(id(getattr(held, name)) for name in FP8_TENSORS)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _check_names(leaves: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    missing, unknown = [n for n in leaves if n not in tensors], [n for n in tensors if n not in leaves]
    if missing or unknown:
        parts = [("missing", missing), ("unknown", unknown)]
        text = "; ".join(f"{what}: {_few(names)}" for what, names in parts if names)
        raise SpecError(
            f"Expected the tensors of this state by the names of to_tensors, got other names ({text}). "
            "Use a state of the same program."
        )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(str, names[:5])) + more


def _check_leaf(name: str, leaf: torch.Tensor, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.shape != leaf.shape or tensor.dtype != leaf.dtype:
        raise SpecError(
            f"Expected {name} to be {_described(leaf)}, got {_described(tensor)}. Use a state of the same program."
        )
    if tensor.is_meta or tensor.layout != leaf.layout:
        kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise SpecError(f"Expected {name} with values like those of the state, got a tensor {kind}. Convert it first.")


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return described_tensor(value)
