"""Mistakes that people make at first: each message says what was expected, what came, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import scoped_fn as sf
from scoped_fn.interop import torch_to_jax

X = torch.ones(2, 3)
STATE, NORM = sf.compile(sf.init_state(), nn.BatchNorm1d(3), (X,), backend="eager")
DROPPED = sf.compile(sf.init_state(), lambda x: torch.dropout(x, 0.5, True).sum(), (X,), backend="eager")


def _hessian() -> Any:
    state, fn = DROPPED
    return torch.func.hessian(lambda x: fn(state, x)[1])(X)


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an array of NumPy": (lambda _: NORM(STATE, NORM.params, np.ones((2, 3))), "torch.from_numpy or interop.jax_to"),
    "an array of JAX": (lambda _: NORM(STATE, NORM.params, torch_to_jax(X)), "interop.jax_to_torch"),
    "a state of JAX": (lambda _: NORM(torch_to_jax(STATE), NORM.params, X), r"go through interop\.jax_to_torch"),
    "parameters of JAX": (lambda _: NORM(STATE, torch_to_jax(NORM.params), X), r"go through interop\.jax_to_torch"),
    "no function for a step": (lambda _: sf.value_and_grad(X), "got a Tensor. Pass what sf.compile returned"),  # type: ignore[arg-type]
    "no state returned": (
        lambda _: sf.value_and_grad(lambda state, x: (x * x).sum())(STATE, X),
        "returns a Tensor. Return the state too",
    ),
    "randomness of another name": (lambda _: sf.vmap(NORM, randomness="diff"), "'same' or 'different', got 'diff'"),
    "in_dims with the state": (
        lambda _: sf.vmap(NORM, in_dims=(None, None, 0))(STATE, NORM.params, X),
        "for 2 arguments, .* Leave the state out",
    ),
    "hessian of dropout": (lambda _: _hessian(), r"jacfwd\(jacrev\(f\), randomness='same'\)"),
    "a tensor as a key": (lambda folder: sf.save({X: 1}, folder / "a"), "got a torch.Tensor at the top as a key"),
    "a tuple as a key": (
        lambda folder: sf.save({"a": {(1, 2): 1}}, folder / "a"),
        "got a builtins.tuple at a as a key",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(name: str, tmp_path: Path) -> None:
    call, words = MISTAKES[name]
    with pytest.raises(Exception, match=rf"(?s)^Expected .*{words}") as error:
        call(tmp_path)
    assert type(error.value).__module__.startswith("scoped_fn")
    assert ", got " in str(error.value)


def test_buffers_are_set_by_a_compiled_function_as_by_its_token() -> None:
    new = {name: buffer + 1 for name, buffer in STATE.buffers[NORM.owner].items()}
    assert sf.tree_equal(sf.set_buffers(STATE, NORM, new), sf.set_buffers(STATE, NORM.owner, new))
