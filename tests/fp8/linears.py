"""Small models under a recipe, and steps that give each role of a linear the amax that a test wants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

import scoped_fn as sf

SIZE = 16
State = sf.CompilerState
Parameters = Mapping[str, torch.Tensor]
ARGUMENTS = {"input": "x", "weight": "w", "grad_output": "dy"}


class Plain(nn.Module):
    """One linear function, called `fc`."""

    def __init__(self, columns: int = SIZE, rows: int = SIZE, *, bias: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(columns, rows, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class Weighted(Plain):
    """A loss whose gradient with respect to the output of `fc` is the second input."""

    def forward(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return (self.fc(x) * dy).sum()


class Checkpointed(Plain):
    """The same loss, with the linear computed again in backward."""

    def forward(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        y = torch.utils.checkpoint.checkpoint(self.fc, x, use_reentrant=False)
        return (y.tanh() * dy).sum()


class Branches(nn.Module):
    """Two linear functions of one input, both returned."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


def spike(amax: float, rows: int = SIZE, columns: int = SIZE) -> torch.Tensor:
    """A matrix of zeros with one number, so that this is its amax."""
    matrix = torch.zeros(rows, columns)
    matrix[0, 0] = -amax
    return matrix


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """The same random numbers whenever they are asked for."""
    return torch.randn(shape or (SIZE, SIZE), generator=torch.Generator().manual_seed(seed))


def scoped(
    recipe: Any, model: nn.Module | None = None, *inputs: torch.Tensor, state: State | None = None, **scope: Any
) -> tuple[State, sf.CompiledFn]:
    """A model (`Weighted` unless given) compiled under a scope, which stays open."""
    model = Weighted() if model is None else model
    inputs = inputs or ((spike(1),) if type(model) in (Plain, Branches) else (spike(1), spike(1)))
    state = sf.autocast(sf.init_state() if state is None else state, recipe, **scope)
    return sf.compile(state, model, inputs, backend="eager")


def rescoped(state: State, recipe: Any, **scope: Any) -> State:
    """The state with another scope in place of the one on top."""
    return sf.autocast(sf.end_autocast(state), recipe, **scope)


def delayed(length: int = 4, **fields: Any) -> sf.DelayedScaling:
    return sf.DelayedScaling(amax_history_len=length, **fields)


def detached(fn: sf.CompiledFn) -> dict[str, torch.Tensor]:
    """Copies of a function's parameters that require no gradient."""
    return {name: one.detach().clone() for name, one in fn.params.items()}


def leaves(fn: sf.CompiledFn) -> dict[str, torch.Tensor]:
    """Copies of a function's parameters that autograd gives a gradient."""
    return {name: one.requires_grad_() for name, one in detached(fn).items()}


def step(state: State, fn: sf.CompiledFn, x: float = 1.0, w: float = 1.0, dy: float = 1.0) -> State:
    """One training step of a `Weighted` whose tensors have these amaxes."""
    after, _ = sf.value_and_grad(fn)(state, {"fc.weight": spike(w)}, spike(x), spike(dy))
    return after


def steps(state: State, fn: sf.CompiledFn, *amaxes: float, role: str = "input") -> State:
    """A step for each amax of one role; the other roles have 1."""
    for amax in amaxes:
        state = step(state, fn, **{ARGUMENTS[role]: amax})
    return state


def backward_step(state: State, loss: Callable[[State], tuple[State, torch.Tensor]]) -> State:
    """One step by plain autograd."""
    state, sinks = sf.watch_gradients(state)
    state, value = loss(state)
    value.backward()
    return sf.update_scales(sf.stage_gradients(state, sinks))


def column(state: State, fn: sf.CompiledFn, role: str = "input", site: str = "fc") -> tuple[float, list[float]]:
    """The scale and the history of one role: row 0 is staging, the rest oldest first."""
    held = state.fp8[fn.owner]
    index = held.columns.index((site, role))
    return held.scale[index].item(), held.amax_history[:, index].tolist()


def scale(state: State, fn: sf.CompiledFn, role: str = "input", site: str = "fc") -> float:
    return column(state, fn, role, site)[0]


def history(state: State, fn: sf.CompiledFn, role: str = "input", site: str = "fc") -> list[float]:
    return column(state, fn, role, site)[1]


def fp8_tensors(state: State, fn: sf.CompiledFn) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps of one function's FP8 state."""
    held = state.fp8[fn.owner]
    return {"scale": held.scale, "amax_history": held.amax_history}


def arrays(state: State) -> list[np.ndarray]:
    """The leaves of a state for chex."""
    return [leaf.detach().numpy() for leaf in sf.state.tree_leaves(state)]


@functools.cache
def compiled_once(
    recipe: Any, shape: tuple[int, int, int], dtype: torch.dtype, bias: bool
) -> tuple[State, sf.CompiledFn]:
    """A linear function of x (m, k) to (m, n) under a recipe, before its first step."""
    m, k, n = shape
    return scoped(recipe, Plain(k, n, bias=bias).to(dtype), torch.zeros(m, k, dtype=dtype))


def products(
    recipe: Any, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, bias: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Output and gradients of one compiled linear function in its first step."""
    state, fn = compiled_once(recipe, (*x.shape, len(w)), x.dtype, bias is not None)
    given = {"x": x, "w": w} | ({} if bias is None else {"b": bias})
    given = {name: one.detach().clone().requires_grad_() for name, one in given.items()}
    params = {"fc.weight": given["w"]} | ({} if bias is None else {"fc.bias": given["b"]})
    _, y = fn(state, params, given["x"])
    grads = torch.autograd.grad(y, list(given.values()), dy)
    return {"y": y.detach()} | {f"d{name}": grad for name, grad in zip(given, grads, strict=True)}
