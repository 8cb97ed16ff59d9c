"""Short ways to compile under an FP8 scope, to train, and to read the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import chex
import numpy as np
import torch
from torch import Tensor

import scoped_fn as sf
from tests.fp8.networks import batches, loss_of

KINDS = ("delayed", "current", "block", "mx")
# Every recipe on the small network, one on the large one.
NETWORKS = [*(("mlp", kind) for kind in KINDS), ("block", "delayed")]
Params = Mapping[str, Tensor]
Described = Mapping[str, Mapping[str, Mapping[str, Any]]]


def recipe(kind: str = "delayed", **fields: Any) -> Any:
    """The recipe of a kind; delayed scaling with a short history."""
    if kind == "delayed":
        return sf.DelayedScaling(**{"amax_history_len": 4, **fields})
    makers = {"current": sf.Float8CurrentScaling, "block": sf.Float8BlockScaling, "mx": sf.MXFP8BlockScaling}
    return makers[kind](**fields)


@dataclass(frozen=True)
class Run:
    """A function compiled under a scope, its first state and parameters that are nobody's leaves."""

    state: sf.CompilerState
    fn: sf.CompiledFn
    params: dict[str, Tensor]


def scoped(
    model: Callable[..., Any],
    inputs: tuple[Any, ...],
    of: Any = "delayed",
    *,
    backend: Any = "eager",
    state: sf.CompilerState | None = None,
    **options: Any,
) -> Run:
    """The model compiled under a recipe, or the recipe of a kind."""
    state = sf.init_state() if state is None else state
    state = sf.autocast(state, recipe(of) if isinstance(of, str) else of, **options)
    state, fn = sf.compile(state, model, inputs, backend=backend)
    return Run(state, fn, {name: one.detach().clone() for name, one in fn.params.items()})


def example(of: Any = "delayed", name: str = "mlp", **options: Any) -> tuple[Run, list[tuple[Tensor, Tensor]]]:
    """A compiled loss and four batches."""
    data = batches(name, 4)
    return scoped(loss_of(name), data[0], of, **options), data


def descended(params: Params, grads: Params, rate: float = 0.05) -> dict[str, Tensor]:
    """The parameters after a step of plain gradient descent."""
    return {name: own - rate * grads[name] for name, own in params.items()}


def trained(run: Run, data: Iterable[tuple[Any, ...]]) -> tuple[Run, list[Tensor]]:
    """The run after a step with each batch, and the losses."""
    step, state, params, losses = sf.value_and_grad(run.fn), run.state, run.params, []
    for batch in data:
        state, (loss, grads) = step(state, params, *batch)
        params = descended(params, grads)
        losses.append(loss)
    return Run(state, run.fn, params), losses


def rescoped(state: sf.CompilerState, of: Any, **options: Any) -> sf.CompilerState:
    """The state under another scope in place of the top one."""
    return sf.autocast(sf.end_autocast(state), of, **options)


def plain(described: Described) -> dict[str, Any]:
    """A description as plain dictionaries, which compare by value."""
    return {
        site: {role: {"history": list(one["history"]), "scale": float(one["scale"])} for role, one in roles.items()}
        for site, roles in described.items()
    }


def scales(state: sf.CompilerState, owner: int | None = None) -> dict[str, Any]:
    """Scales and histories of a state, as plain dictionaries."""
    return plain(sf.describe_fp8(state, owner))


def newest(state: sf.CompilerState, owner: int | None = None) -> dict[str, dict[str, float]]:
    """The newest amax of each role of each site: the staged one, if there is one."""
    return {
        site: {role: one["history"][0] for role, one in roles.items()} for site, roles in scales(state, owner).items()
    }


def largest(many: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """The largest amax of each role of each site."""
    all_of_them = list(many)
    return {
        site: {role: max(one[site][role] for one in all_of_them) for role in roles}
        for site, roles in all_of_them[0].items()
    }


def arrays(state: sf.CompilerState) -> dict[str, Any]:
    """The tensors of a state, by name, for chex."""
    parts = {
        str(owner): {name: getattr(part, name).numpy() for name in ("scale", "amax_history", "grad_sink")}
        for owner, part in state.fp8.items()
    }
    leaves = {str(index): np.asarray(leaf) for index, leaf in enumerate(sf.state.tree_leaves(state))}
    return {"fp8": parts, "leaves": leaves}


def assert_same_shape_of_state(after: sf.CompilerState, before: sf.CompilerState) -> None:
    """Nothing but numbers differs."""
    assert sf.state.tree_structure(after) == sf.state.tree_structure(before)
    chex.assert_trees_all_equal_structs(arrays(after), arrays(before))
    chex.assert_trees_all_equal_shapes(arrays(after), arrays(before))
    chex.assert_trees_all_equal_dtypes(arrays(after), arrays(before))


def compiled_so_far(fn: sf.CompiledFn) -> tuple[int, int, int]:
    """How often it was captured, how many graphs were compiled, and what ran eager."""
    info = fn.cache_info()
    return info.captures, info.compiled_graphs, info.eager_calls


def assert_norm_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """The difference is small beside the expected tensor, as a whole."""
    error = torch.linalg.vector_norm((actual - expected).double())
    assert error <= relative * torch.linalg.vector_norm(expected.double()), f"{error} of {expected.norm()}"
