"""Transforms of stateful functions: they take and return functions `(state, *args) -> (state, out)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from scoped_fn._compiled import CompiledFn
from scoped_fn._errors import SpecError
from scoped_fn._one_graph import check_scalar
from scoped_fn._structure import flatten, unflatten
from scoped_fn._whole_step import WholeStep
from scoped_fn.state import CompilerState, tree_map

StatefulFn = Callable[..., tuple[CompilerState, Any]]


def value_and_grad(fn: StatefulFn, *, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> StatefulFn:
    """Returns the stateful function `(state, *args) -> (state, (value, gradients))`.

    Of a compiled function, forward and backward run as one compiled graph. Any other stateful function runs as it is,
    with plain autograd.

    Args:
        fn: `(state, *args) -> (state, value)`; the value is a scalar: shape [], real floating point.
        argnums: Which arguments to differentiate, counted after the state. For a compiled module 0 is the parameters.
        has_aux: The function returns `(value, aux)` and so does the new one: `(state, ((value, aux), gradients))`.

    Returns:
        A function whose gradients have the structure of the argument (a tuple of them for a tuple `argnums`). What the
        value does not depend on has a gradient of zeros, and so has a parameter of a compiled module that was frozen
        when it was compiled. Parameters come back under the names they were passed by.

    Raises:
        SpecError: At the call: the value is not a scalar, or an argument has tensors that are not differentiable.

    Example:
        >>> import torch, scoped_fn as sf
        >>> state, fn = sf.compile(sf.init_state(), lambda w, x: (w * x).sum(), (torch.ones(2),) * 2, backend="eager")
        >>> state, (value, grad) = sf.value_and_grad(fn)(state, torch.ones(2), torch.tensor([3.0, 4.0]))
        >>> value, grad
        (tensor(7.), tensor([3., 4.]))
    """
    if not callable(fn):
        raise SpecError(
            f"Expected a stateful function, got a {type(fn).__name__}. Pass (state, *args) -> (state, out)."
        )
    if any(not isinstance(i, int) or i < 0 for i in (argnums if isinstance(argnums, tuple) else (argnums,))):
        raise SpecError(f"Expected argnums of 0 or more, got {argnums!r}. Count arguments after the state.")
    if isinstance(fn, CompiledFn):
        return WholeStep(fn, argnums, has_aux)

    def value_and_grad_of(state: CompilerState, *args: Any, **kwargs: Any) -> tuple[CompilerState, Any]:
        places = (argnums,) if isinstance(argnums, int) else argnums
        if max(places, default=0) >= len(args):
            raise SpecError(f"Expected argnums below {len(args)}, got {argnums!r}. Count arguments after the state.")
        flat = [flatten(args[i], f"argument {i}") for i in places]
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [[_leaf(tensor, i) for tensor in tensors] for i, (tensors, _) in zip(places, flat, strict=True)]
            changed = dict(enumerate(args))
            for i, mine, (_, structure) in zip(places, leaves, flat, strict=True):
                changed[i] = unflatten(structure, list(mine))
            state, out = fn(state, *changed.values(), **kwargs)
            value = check_scalar(out[0] if has_aux else out)
            found = iter(_gradients(value, [leaf for mine in leaves for leaf in mine]))
        grads = tuple(unflatten(s, [next(found) for _ in mine]) for mine, (_, s) in zip(leaves, flat, strict=True))
        apart: Any = tree_map(_detached, state)  # type: ignore[arg-type]
        return apart, (detached(out), grads[0] if isinstance(argnums, int) else grads)

    return value_and_grad_of


def _gradients(value: torch.Tensor, leaves: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    if not leaves or not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad(value, leaves, materialize_grads=True)


def detached(value: Any) -> Any:
    """Returns a structured value with its tensors detached from autograd's graph."""
    tensors, structure = flatten(value, "outputs")
    return unflatten(structure, [tensor.detach() for tensor in tensors])


def _leaf(tensor: torch.Tensor, place: int) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise SpecError(
            f"Expected argument {place} to have floating point tensors to differentiate, got {tensor.dtype}. "
            "Choose others with argnums."
        )
    return (tensor.clone() if tensor.is_inference() else tensor).detach().requires_grad_()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
