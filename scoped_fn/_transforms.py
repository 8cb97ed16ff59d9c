"""Transforms of stateful functions: they take and return functions `(state, *args) -> (state, out)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scoped_fn._compiled import CompiledFn
from scoped_fn._errors import SpecError
from scoped_fn._fp8.quantized_params import QuantizedParams
from scoped_fn._fp8.results import without_staged
from scoped_fn._fp8.sinks import close_sinks, lacks_sinks, open_sinks, recorded, with_sinks
from scoped_fn._one_graph import check_scalar
from scoped_fn._structure import Structure, flatten, unflatten
from scoped_fn._torch.dual import in_transform
from scoped_fn._whole_step import WholeStep
from scoped_fn.state import CompilerState
from scoped_fn.state.frames import close_frames, open_frames

StatefulFn = Callable[..., tuple[CompilerState, Any]]


def value_and_grad(
    fn: StatefulFn, *, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, accumulate: bool = False
) -> StatefulFn:
    """Returns the stateful function `(state, *args) -> (state, (value, gradients))`.

    Of a compiled function, forward and backward run as one compiled graph; under another transform they run as that
    transform of `torch.func.grad` of it. Any other stateful function runs as it is, under `torch.func.grad`.

    The results carry no graph of plain autograd, so that training steps do not hang on one another: for derivatives of
    gradients use transforms.

    Args:
        fn: `(state, *args) -> (state, value)`; the value is a scalar: shape [], real floating point.
        argnums: Which arguments to differentiate, counted after the state. For a compiled module 0 is the parameters.
        has_aux: The function returns `(value, aux)` and so does the new one: `(state, ((value, aux), gradients))`.
        accumulate: Whether the FP8 scales stay as they are, for several calls in one step; `update_scales` ends it.
            Else each call is one step: scales of the compiled functions that ran are updated once. (Inside another
            transform they are left as they are in any case, unless each index of a `vmap` has a state of its own.)

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
            f"Expected a stateful function, (state, *args) -> (state, out), got a {type(fn).__name__}. "
            "Pass what sf.compile returned, or a function that calls it."
        )
    if any(not isinstance(i, int) or i < 0 for i in (argnums if isinstance(argnums, tuple) else (argnums,))):
        raise SpecError(f"Expected argnums of 0 or more, got {argnums!r}. Count arguments after the state.")
    generic = ValueAndGrad(fn, argnums, has_aux, accumulate)
    return WholeStep(fn, argnums, has_aux, generic, accumulate) if isinstance(fn, CompiledFn) else generic


def grad(
    fn: StatefulFn, *, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, accumulate: bool = False
) -> StatefulFn:
    """Returns the stateful function `(state, *args) -> (state, gradients)`.

    Args and errors are those of `value_and_grad`. With `has_aux` it gives `(state, (gradients, aux))`.

    Example:
        >>> import torch, scoped_fn as sf
        >>> state, fn = sf.compile(sf.init_state(), lambda x: (x**3).sum(), (torch.ones(2),), backend="eager")
        >>> state, first = sf.grad(fn)(state, torch.tensor([1.0, 2.0]))
        >>> first
        tensor([ 3., 12.])
    """
    both = value_and_grad(fn, argnums=argnums, has_aux=has_aux, accumulate=accumulate)

    def grad_of(state: CompilerState, *args: Any, **kwargs: Any) -> tuple[CompilerState, Any]:
        state, (value, grads) = both(state, *args, **kwargs)
        return state, (grads, value[1]) if has_aux else grads

    return grad_of


@dataclass(frozen=True)
class ValueAndGrad:
    """`value_and_grad` of any stateful function, by `torch.func`: under other transforms too."""

    fn: StatefulFn
    argnums: int | tuple[int, ...]
    has_aux: bool
    accumulate: bool = False

    def __call__(self, state: CompilerState, *args: Any, **kwargs: Any) -> tuple[CompilerState, Any]:
        """Returns the next state, and the value with the gradients."""
        places = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        if max(places, default=0) >= len(args):
            raise SpecError(
                f"Expected argnums below {len(args)}, got {self.argnums!r}. Count arguments after the state."
            )
        if torch.compiler.is_dynamo_compiling() or in_transform():
            return self._run(state, args, kwargs, places, lambda tensor: tensor)
        with torch.inference_mode(False), torch.enable_grad():
            after, result = self._run(state, args, kwargs, places, _apart)
        return detached(after), detached(result)

    def _run(
        self, state: CompilerState, args: Any, kwargs: Any, places: tuple[int, ...], prepare: Callable[..., Any]
    ) -> tuple[CompilerState, Any]:
        flat = {i: flatten(_differentiable(args[i]), f"argument {i}") for i in places}
        leaves = [prepare(_checked(tensor, i)) for i, (mine, _) in flat.items() for tensor in mine]
        state, frames = open_frames(state)  # the backward of whatever runs now comes before this ends
        opened, sinks = open_sinks(state, prepare)
        (after, out), found, ran = self._differentiate(opened, args, kwargs, flat, leaves, sinks)
        if lacks_sinks(opened, after) and not torch.compiler.is_dynamo_compiling():
            opened, sinks = open_sinks(without_staged(state, after), prepare)  # now that the columns are known
            (after, out), found, ran = self._differentiate(opened, args, kwargs, flat, leaves, sinks)
        rest = iter(found[: len(leaves)])
        amaxes = dict(zip(sinks, found[len(leaves) :], strict=True))
        after = close_frames(close_sinks(state, after, amaxes, ran, self.accumulate), frames)
        grads = tuple(unflatten(structure, [next(rest) for _ in mine]) for mine, structure in flat.values())
        return after, (out, grads[0] if isinstance(self.argnums, int) else grads)

    def _differentiate(
        self,
        state: CompilerState,
        args: Any,
        kwargs: Any,
        flat: dict[int, Any],
        leaves: list[torch.Tensor],
        sinks: dict[int, torch.Tensor],
    ) -> tuple[Any, Sequence[torch.Tensor], frozenset[int]]:
        """Returns (state, out), a gradient for each leaf and FP8 sink, and the owners that recorded amaxes."""
        structures: list[Structure] = []
        ran: list[frozenset[int]] = []

        def value_of(*given: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            changed, rest = dict(enumerate(args)), iter(given)
            for i, (mine, structure) in flat.items():
                changed[i] = _as_given(args[i], unflatten(structure, [next(rest) for _ in mine]))
            inner = with_sinks(state, dict(zip(sinks, rest, strict=True)))
            after, out = _two(self.fn(inner, *changed.values(), **kwargs))
            ran.append(recorded(inner, after))
            value = check_scalar(out[0] if self.has_aux else out)
            tensors, structure = flatten((after, out), "outputs")
            structures.append(structure)
            return value, tensors

        leaves = [*leaves, *sinks.values()]
        if not leaves:
            tensors = value_of()[1]
            return unflatten(structures[-1], tensors), (), ran[-1]
        argnums = tuple(range(len(leaves)))
        found, (_, tensors) = torch.func.grad_and_value(value_of, argnums=argnums, has_aux=True)(*leaves)
        return unflatten(structures[-1], tensors), found, ran[-1]


def _two(result: Any) -> tuple[CompilerState, Any]:
    """Returns what a stateful function gave; raises `SpecError` if it is no state and a value."""
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not isinstance(result[0], CompilerState):
        raise SpecError(
            f"Expected a stateful function, (state, *args) -> (state, out), got one that returns a "
            f"{type(result).__name__}. Return the state too, the one that the calls inside gave."
        )
    return result[0], result[1]


def _differentiable(argument: Any) -> Any:
    return dict(argument.params) if isinstance(argument, QuantizedParams) else argument


def _as_given(argument: Any, new: Any) -> Any:
    return argument.with_params(new) if isinstance(argument, QuantizedParams) else new


def detached(value: Any) -> Any:
    """Returns a structured value with its tensors detached from autograd's graph."""
    tensors, structure = flatten(value, "outputs")
    return unflatten(structure, [tensor.detach() for tensor in tensors])


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.clone() if tensor.is_inference() else tensor).detach()


def _checked(tensor: torch.Tensor, place: int) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise SpecError(
            f"Expected argument {place} to have floating point tensors to differentiate, got {tensor.dtype}. "
            "Choose others with argnums."
        )
    return tensor
