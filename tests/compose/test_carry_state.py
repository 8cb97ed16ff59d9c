"""Buffers under the carry-first transforms: they move as in eager torch, and come back in the next state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import numpy as np
import pytest
import torch
from torch.utils import _pytree as torch_pytree

import scoped_fn as sf
from tests.compose.carried import Normed, normed
from tests.compose.case import numbers
from tests.compose.modules import batch_norm_evaluated
from tests.compose.quiet import QUIET
from tests.compose.trees import mapped, stacked, waves
from tests.helpers import assert_same, compiled, tensors, unchanged

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
Way = Callable[[Normed, sf.CompilerState, torch.Tensor], tuple[sf.CompilerState, Any]]
TwinWay = Callable[[Normed, torch.Tensor], Any]


def arrays(state: sf.CompilerState) -> list[np.ndarray]:
    """The leaves of a state for chex."""
    return [leaf.numpy() for leaf in sf.state.tree_leaves(state)]


def assert_same_statics(after: sf.CompilerState, before: sf.CompilerState) -> None:
    """All but the numbers is the same in both states."""
    assert sf.state.tree_structure(after) == sf.state.tree_structure(before)
    assert torch_pytree.tree_structure(after) == torch_pytree.tree_structure(before)
    chex.assert_trees_all_equal_structs(arrays(after), arrays(before))
    chex.assert_trees_all_equal_shapes_and_dtypes(arrays(after), arrays(before))


def by_grad(one: Normed, state: sf.CompilerState, x: torch.Tensor) -> tuple[sf.CompilerState, Any]:
    return sf.grad(one.loss)(state, one.params, x)


def by_value_and_grad(one: Normed, state: sf.CompilerState, x: torch.Tensor) -> tuple[sf.CompilerState, Any]:
    return sf.value_and_grad(one.loss, argnums=(0, 1))(state, one.params, x)


def by_jvp(one: Normed, state: sf.CompilerState, x: torch.Tensor) -> tuple[sf.CompilerState, Any]:
    return sf.jvp(one.loss)(state, (one.params, x), waves((one.params, x)))


def by_vjp(one: Normed, state: sf.CompilerState, x: torch.Tensor) -> tuple[sf.CompilerState, Any]:
    state, (value, pull) = sf.vjp(one.loss)(state, one.params, x)
    return state, (value, pull(torch.ones_like(value)))


TWINS: dict[Way, TwinWay] = {
    by_grad: lambda one, x: torch.func.grad(one.twin, has_aux=True)(one.params, x)[0],
    by_value_and_grad: lambda one, x: (
        one.twin(one.params, x)[0],
        torch.func.grad(one.twin, argnums=(0, 1), has_aux=True)(one.params, x)[0],
    ),
    by_jvp: lambda one, x: torch.func.jvp(one.twin, (one.params, x), waves((one.params, x)), has_aux=True)[:2],
    by_vjp: lambda one, x: (
        one.twin(one.params, x)[0],
        torch.func.grad(one.twin, argnums=(0, 1), has_aux=True)(one.params, x)[0],
    ),
}


@pytest.mark.parametrize("way", TWINS, ids=lambda way: way.__name__)
def test_statistics_move_as_in_eager_over_many_calls(way: Way) -> None:
    one = normed()
    state, model = one.state, one.fn.captured.source.call
    with unchanged(one.state, one.params):
        for step in range(3):
            x = numbers(4, 2, seed=step)
            state, out = way(one, state, x)
            assert_same(out, TWINS[way](one, x), **CLOSE)
            model(x)
            assert_same_statics(state, one.state)
    assert_same(dict(state.buffers[one.fn.owner]), dict(model.named_buffers()), **CLOSE)
    assert not any(tensor.requires_grad for tensor in tensors(state))
    assert one.fn.cache_info().eager_calls == 0


def test_the_state_goes_through_a_gradient_of_a_gradient() -> None:
    one, x = normed(), numbers(4, 2)

    def penalty(state: sf.CompilerState, params: Any, x: torch.Tensor) -> tuple[sf.CompilerState, torch.Tensor]:
        for _ in range(2):
            state, slopes = sf.grad(one.loss)(state, params, x)
        return state, sum(slope.square().sum() for slope in slopes.values())

    state, _ = sf.value_and_grad(penalty)(one.state, one.params, x)
    assert state.buffers[one.fn.owner]["1.num_batches_tracked"] == 2
    assert_same_statics(state, one.state)
    by_hand = one.fn(one.fn(one.state, one.params, x)[0], one.params, x)[0]
    assert_same(dict(state.buffers[one.fn.owner]), dict(by_hand.buffers[one.fn.owner]), **CLOSE)
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors(state))


def test_a_training_loop_by_sf_grad_is_eagers() -> None:
    one = normed()
    model = one.fn.captured.source.call
    state, params, twin_params = one.state, one.params, one.params
    for step in range(4):
        x = numbers(4, 2, seed=10 + step)
        state, slopes = sf.grad(one.loss)(state, params, x)
        params = {name: own - 0.1 * slopes[name] for name, own in params.items()}
        twin_slopes, _ = torch.func.grad(one.twin, has_aux=True)(twin_params, x)
        with torch.no_grad():
            torch.func.functional_call(model, twin_params, (x,))
        twin_params = {name: own - 0.1 * twin_slopes[name] for name, own in twin_params.items()}
    assert_same(params, twin_params, **CLOSE)
    assert_same(dict(state.buffers[one.fn.owner]), dict(model.named_buffers()), **CLOSE)


def members(one: Normed, count: int) -> tuple[list[sf.CompilerState], list[Any]]:
    """States and parameters that differ from member to member."""
    states, params = [one.state], [one.params]
    for i in range(1, count):
        params.append({name: own * (1 + 0.3 * i) for name, own in one.params.items()})
        states.append(one.fn(states[-1], params[-1], numbers(4, 2, seed=i))[0])
    return states, params


def joined(trees: list[Any]) -> Any:
    return torch_pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def member(tree: Any, index: int) -> Any:
    return mapped(lambda leaf: leaf[index], tree)


STATEFUL: dict[str, Callable[[Normed], Any]] = {
    "a call": lambda one: one.fn,
    "the loss": lambda one: one.loss,
    "grad": lambda one: sf.grad(one.loss),
    "value_and_grad": lambda one: sf.value_and_grad(one.loss, argnums=(0, 1)),
}


@pytest.mark.parametrize("what", STATEFUL)
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}], ids=["at once", "in chunks"])
def test_each_member_of_an_ensemble_has_its_own_statistics(what: str, options: dict[str, Any]) -> None:
    one, x = normed(), numbers(4, 2, seed=5)
    function = STATEFUL[what](one)
    states, params = members(one, 3)
    many = sf.vmap(function, in_dims=(0, None), state_dim=0, **options)
    after, out = many(joined(states), joined(params), x)
    assert sf.state.tree_structure(after) == sf.state.tree_structure(joined(states))
    for index, (state, own) in enumerate(zip(states, params, strict=True)):
        alone, expected = function(state, own, x)
        assert_same(member(out, index), expected, **CLOSE)
        assert_same(dict(member(after, index).buffers[one.fn.owner]), dict(alone.buffers[one.fn.owner]), **CLOSE)
    again, _ = many(after, joined(params), x)  # what comes back can be used
    assert again.buffers[one.fn.owner]["1.num_batches_tracked"].tolist() == [2, 3, 4]
    assert one.fn.cache_info().eager_calls == 0


def test_one_state_for_all_is_refused_where_statistics_differ() -> None:
    one, rows = normed(), stacked(numbers(4, 2))
    for function in (one.fn, one.loss, sf.grad(one.loss)):
        with pytest.raises(sf.SpecError, match="next state that all indices of vmap share.*Pass state_dim=0"):
            sf.vmap(function, in_dims=(None, 0))(one.state, one.params, rows)
    assert_same(one.fn(one.state, one.params, rows[0])[1], one.fn.captured.source.call(rows[0]).detach(), **CLOSE)


def test_one_state_for_all_in_evaluation_comes_back_once() -> None:
    model = batch_norm_evaluated()
    state, fn = compiled(model, (numbers(3, 2),))
    params = {name: own.detach() for name, own in fn.params.items()}
    rows = stacked(numbers(3, 2))
    after, out = sf.vmap(fn, in_dims=(None, 0))(state, params, rows)
    assert_same_statics(after, state)
    assert sf.tree_equal(after, state)
    assert_same(out, torch.stack([model(x) for x in rows]).detach(), **CLOSE)


def test_one_state_for_all_where_only_the_statistics_are_shared() -> None:
    one, scales = normed(), torch.arange(1.0, 4.0, dtype=torch.float64)
    x = numbers(4, 2)

    def scaled(state: sf.CompilerState, scale: torch.Tensor) -> tuple[sf.CompilerState, torch.Tensor]:
        state, out = one.fn(state, one.params, x)
        return state, out * scale

    after, out = sf.vmap(scaled)(one.state, scales)
    expected, alone = one.fn(one.state, one.params, x)
    assert_same(out, alone * scales[:, None, None], **CLOSE)
    assert_same(dict(after.buffers[one.fn.owner]), dict(expected.buffers[one.fn.owner]), **CLOSE)


def test_two_compiled_functions_in_one_state() -> None:
    one, x = normed(), numbers(4, 2)
    other_state, other = sf.compile(one.state, batch_norm_evaluated().train(), (x,), backend="eager")
    params = {name: own.detach() for name, own in other.params.items()}

    def both(state: sf.CompilerState, mine: Any, others: Any) -> tuple[sf.CompilerState, torch.Tensor]:
        state, first = one.loss(state, mine, x)
        state, second = other(state, others, x)
        return state, first * second.square().sum()

    state, (_, slopes) = sf.value_and_grad(both, argnums=(0, 1))(other_state, one.params, params)
    assert [len(slope) for slope in slopes] == [4, 4]
    assert_same_statics(state, other_state)
    for fn in (one.fn, other):
        assert state.buffers[fn.owner]["1.num_batches_tracked"] == 1
