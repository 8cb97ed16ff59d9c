"""Queued inputs: real ones for a profile that is still to come, and made-up ones once they are used up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from scoped_fn._errors import SpecError
from scoped_fn._specs import TensorSpec, spec_of
from scoped_fn._state_check import check_state
from scoped_fn._structure import flatten, unflatten
from scoped_fn.state import CompilerState, InputQueue, InputSpec, QueuedInputs, init_state
from scoped_fn.state.owners import check_owner, token_of


class SyntheticInputs(tuple[Any, ...]):
    """Positional arguments that were made up from an `InputSpec`.

    Attributes:
        kwargs: Keyword arguments.
    """

    kwargs: dict[str, Any]


def push_inputs(
    state: CompilerState,
    owner: Any,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    keep_integers: bool = False,
) -> CompilerState:
    """Returns the state with inputs of one call at the end of an owner's queue.

    `profile` takes them out. The tensors are kept as they are, not copied, until they are taken. What was pushed while
    a frame of the owner was open goes when its last frame is closed. Their spec stays.

    Args:
        state: A state that holds the owner.
        owner: A token, or anything with an `owner` attribute.
        inputs: Positional arguments as `compile` takes them, without parameters.
        kwargs: Keyword arguments.
        keep_integers: Whether the spec keeps the values of integer tensors, such as token ids, so that made-up inputs
            have them too.

    Raises:
        SpecError: The inputs are no tuple, or hold objects that are neither tensors nor plain data.
        OwnershipError: The state does not hold the owner.
    """
    check_state(state)
    token = check_owner(state, token_of(owner))
    if not isinstance(inputs, tuple):
        raise SpecError(f"Expected inputs as a tuple, got a {type(inputs).__name__}. Write (x,) for one argument.")
    tensors, structure = flatten((inputs, dict(sorted((kwargs or {}).items()))), "inputs")
    specs = tuple(spec_of(tensor, "an input") for tensor in tensors)
    kept = tuple(i for i, tensor in enumerate(tensors) if keep_integers and _is_integer(tensor))
    spec = InputSpec(structure, specs, kept, tuple(tensors[i] for i in kept))
    old = state.inputs[token].entries if token in state.inputs else ()
    entry = QueuedInputs(structure, bool(state.owners[token].frames), tuple(tensors))
    return replace(state, inputs=state.inputs.set(token, InputQueue((*old, entry), spec)))


def take_inputs(state: CompilerState, owner: Any) -> tuple[CompilerState, Any]:
    """Returns the state without the oldest queued inputs, and these: each is given once.

    Args:
        state: A state that holds the owner.
        owner: A token, or anything with an `owner` attribute.

    Returns:
        What was pushed: `inputs`, or `(inputs, kwargs)` if there were keyword arguments. From an empty queue the very
        state and the `InputSpec` of what was pushed last; `materialize` makes inputs from it.

    Raises:
        ValueError: Nothing was ever pushed.
        OwnershipError: The state does not hold the owner.

    Example:
        >>> import torch, scoped_fn as sf
        >>> state, owner = sf.acquire(sf.init_state(), "encoder")
        >>> state = push_inputs(state, owner, (torch.ones(2),))
        >>> state, inputs = take_inputs(state, owner)
        >>> inputs, take_inputs(state, owner)[1]
        ((tensor([1., 1.]),), InputSpec(float32[2]))
    """
    check_state(state)
    token = check_owner(state, token_of(owner))
    queue = state.inputs.get(token)
    if queue is None:
        raise ValueError(
            f"Expected inputs of owner {token} ({state.owners[token].name}), got none that were ever pushed. "
            "Push some: state = sf.push_inputs(state, owner, inputs)."
        )
    if not queue.entries:
        return state, queue.spec
    state, entry = pop_inputs(state, token)
    inputs, kwargs = unflatten(entry.structure, list(entry.tensors))
    return state, (inputs, kwargs) if kwargs else inputs


def pop_inputs(state: CompilerState, token: int) -> tuple[CompilerState, QueuedInputs]:
    """Returns the state without the oldest entry of a queue that has some, and the entry."""
    queue = state.inputs[token]
    return replace(state, inputs=state.inputs.set(token, replace(queue, entries=queue.entries[1:]))), queue.entries[0]


def materialize(spec: InputSpec, key: int | torch.Tensor = 0) -> SyntheticInputs:
    """Returns made-up inputs: standard normal floats, zeros for integers, except where the real ones were kept.

    Args:
        spec: From `take_inputs`.
        key: As in `init_state`. The same key gives the same numbers.

    Raises:
        TypeError: This is no spec: inputs as they are need not be made up.
        ValueError: The key is none.
    """
    if not isinstance(spec, InputSpec):
        raise TypeError(
            f"Expected an InputSpec, got a {type(spec).__name__}. take_inputs gives one, once its queue is empty."
        )
    generator = torch.Generator().manual_seed(_seed(key))
    kept = dict(zip(spec.kept, spec.values, strict=True))
    tensors = [kept[i].clone() if i in kept else _made_up(each, generator) for i, each in enumerate(spec.specs)]
    inputs, kwargs = unflatten(spec.structure, tensors)
    made = SyntheticInputs(inputs)
    made.kwargs = kwargs
    return made


def _made_up(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    def fill(made: torch.Tensor) -> None:
        if spec.differentiable:
            wide = torch.complex64 if spec.dtype.is_complex else torch.float32
            made.copy_(torch.randn(made.shape, dtype=wide, generator=generator, device="cpu"))
        else:
            made.zero_()

    return spec.filled(fill).requires_grad_(spec.requires_grad)


def _seed(key: int | torch.Tensor) -> int:
    """Returns a key as a seed of torch's generator, which takes 32 bits; raises `ValueError` as `init_state` does."""
    with torch.device("cpu"):
        high, low = init_state(key=key).key.tolist()
    return int(low) ^ int(high) * 0x9E3779B1 % 2**32


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
