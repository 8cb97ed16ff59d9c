"""`vmap`, `jvp` and `vjp` of stateful functions: they take the state, and give the next one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from scoped_fn._call import words_of_state
from scoped_fn._errors import SpecError
from scoped_fn._fp8.results import staged_since, with_staged, without_staged
from scoped_fn._random.rows import row_key
from scoped_fn._random.words import keys_of
from scoped_fn._torch.levels import innermost_level, mapped_size
from scoped_fn._torch.wrapped import is_at
from scoped_fn._transforms import StatefulFn
from scoped_fn.state import CompilerState


def vmap(
    fn: StatefulFn,
    in_dims: Any = 0,
    out_dims: Any = 0,
    *,
    randomness: str = "error",
    chunk_size: int | None = None,
    state_dim: int | None = None,
) -> StatefulFn:
    """Returns the stateful function that runs once for each index of a dimension of its arguments.

    Args:
        fn: `(state, *args) -> (state, out)`.
        in_dims: Which dimension of each argument, as in `torch.vmap`; the state is not counted.
        out_dims: Where the dimension goes in the output, as in `torch.vmap`.
        randomness: What random numbers are for the indices: "same"; "different", where each index has a key of its own
            that all of its calls follow from; or "error", which refuses them.
        chunk_size: How many indices to run at once; None for all.
        state_dim: None for one state that all share, and that comes out once, with the maxima of the FP8 amaxes of all
            indices. 0 for one state for each index, stacked: the members of an ensemble of models with buffers.

    Raises:
        SpecError: At the call: the states that come out differ from index to index, and `state_dim` is None.

    Example:
        >>> import torch, scoped_fn as sf
        >>> state, fn = sf.compile(sf.init_state(), lambda w, x: w @ x, (torch.ones(2), torch.ones(2)), backend="eager")
        >>> state, out = sf.vmap(fn, in_dims=(None, 0))(state, torch.ones(2), torch.arange(6.0).reshape(3, 2))
        >>> out
        tensor([1., 5., 9.])
    """
    if randomness not in ("error", "same", "different"):
        raise SpecError(f"Expected randomness 'error', 'same' or 'different', got {randomness!r}. Pick one of them.")

    def mapped(state: CompilerState, *args: Any, **kwargs: Any) -> tuple[CompilerState, Any]:
        dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
        if len(dims) != len(args):
            raise SpecError(f"Expected in_dims for {len(args)} arguments, got {in_dims}. Leave the state out of it.")
        options: dict[str, Any] = {"randomness": randomness, "chunk_size": chunk_size}
        if state_dim is not None:
            stacked = torch.vmap(
                lambda state, *args: fn(state, *args, **kwargs), (state_dim, *dims), (state_dim, out_dims), **options
            )
            return stacked(state, *args)
        after: list[CompilerState] = []

        def run(given: CompilerState, args: Any) -> Any:
            state_after, out = fn(given, *args, **kwargs)
            if given is not state:
                drawn = state_after.key is not given.key
                following = keys_of(words_of_state(state), 1)[0].view(torch.uint32) if drawn else state.key
                state_after = replace(state_after, key=following)
            after.append(_shared(without_staged(state, state_after)))
            return staged_since(state, state_after), out

        def with_own_key(row: torch.Tensor, *args: Any) -> Any:  # torch counts the indices of each chunk from 0
            return run(replace(state, key=row_key(words_of_state(state), row).view(torch.uint32)), args)

        if randomness == "different" and not torch.compiler.is_dynamo_compiling():
            rows = torch.arange(mapped_size(args, dims), dtype=torch.int32, device=state.key.device)
            staged, out = torch.vmap(with_own_key, (0, *dims), (0, out_dims), **options)(rows, *args)
        else:
            staged, out = torch.vmap(lambda *args: run(state, args), dims, (0, out_dims), **options)(*args)
        return with_staged(after[-1], staged), out

    return mapped


def _shared(state: CompilerState) -> CompilerState:
    """Returns the state; raises if it differs from index to index."""
    if torch.compiler.is_dynamo_compiling():
        return state  # torch itself refuses what leaves vmap with a batch
    level = innermost_level()
    if any(is_at(leaf, level) for leaf in pytree.tree_leaves(state)):
        raise SpecError(
            "Expected a next state that all indices of vmap share, got one that differs, such as running statistics of "
            "each sample. Pass state_dim=0 and one state for each index, stacked, or map a model in evaluation mode."
        )
    return state


def jvp(fn: StatefulFn, *, has_aux: bool = False) -> StatefulFn:
    """Returns the stateful function `(state, primals, tangents) -> (state, (out, tangent of out))`.

    Args:
        fn: `(state, *args) -> (state, out)`, differentiated in all of its arguments.
        has_aux: The function returns `(out, aux)`, and the new one `(state, (out, tangent of out, aux))`.

    Example:
        >>> import torch, scoped_fn as sf
        >>> state, fn = sf.compile(sf.init_state(), lambda x: x**2, (torch.ones(1),), backend="eager")
        >>> state, (out, tangent) = sf.jvp(fn)(state, (torch.tensor([3.0]),), (torch.tensor([1.0]),))
        >>> tangent
        tensor([6.])
    """

    def jvp_of(state: CompilerState, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[CompilerState, Any]:
        found: Any = torch.func.jvp(_with_state(fn, state, has_aux), primals, tangents, has_aux=True)
        out, tangent, (state, aux) = found
        return state, (out, tangent, aux) if has_aux else (out, tangent)

    return jvp_of


def vjp(fn: StatefulFn, *, has_aux: bool = False) -> StatefulFn:
    """Returns the stateful function `(state, *args) -> (state, (out, pull))`.

    `pull(cotangents)` gives a tuple of gradients, one for each argument, and needs no state.

    Args:
        fn: `(state, *args) -> (state, out)`, differentiated in all of its arguments.
        has_aux: The function returns `(out, aux)`, and the new one `(state, (out, pull, aux))`.

    Example:
        >>> import torch, scoped_fn as sf
        >>> state, fn = sf.compile(sf.init_state(), lambda x: x**2, (torch.ones(1),), backend="eager")
        >>> state, (out, pull) = sf.vjp(fn)(state, torch.tensor([3.0]))
        >>> pull(torch.tensor([1.0]))
        (tensor([6.]),)
    """

    def vjp_of(state: CompilerState, *args: Any) -> tuple[CompilerState, Any]:
        found: Any = torch.func.vjp(_with_state(fn, state, has_aux), *args, has_aux=True)
        out, pull, (state, aux) = found
        return state, (out, pull, aux) if has_aux else (out, pull)

    return vjp_of


def _with_state(fn: StatefulFn, state: CompilerState, has_aux: bool) -> Any:
    """Returns the function `(*args) -> (out, (next state, aux))`."""

    def run(*args: Any) -> Any:
        after, out = fn(state, *args)
        return (out[0], (after, out[1])) if has_aux else (out, (after, ()))

    return run
