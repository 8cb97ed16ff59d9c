"""torch.func and the transforms that carry a state, over a function compiled in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.utils import _pytree as torch_pytree

import scoped_fn as sf
from tests.compose.quiet import QUIET
from tests.fp8.scoped import KINDS, NETWORKS, Run, example, largest, newest, scales, trained
from tests.helpers import assert_same, tensors

pytestmark = QUIET

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def warm(kind: str = "delayed", name: str = "mlp") -> tuple[Run, tuple[Tensor, Tensor]]:
    """A run after some steps, whose scales are no longer 1, and a batch."""
    run, data = example(kind, name)
    return trained(run, data[:2])[0], data[2]


def one_at_a_time(run: Run, batch: tuple[Tensor, Tensor], call: Callable[..., Any]) -> list[Any]:
    return [call(run.state, run.params, x, y) for x, y in zip(*batch, strict=True)]


def joined(trees: list[Any]) -> Any:
    return torch_pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_grad_gives_the_gradients_of_a_step(kind: str) -> None:
    run, batch = warm(kind)
    _, (value, expected) = sf.value_and_grad(run.fn)(run.state, run.params, *batch)
    grads, loss = grad_and_value(lambda params: run.fn(run.state, params, *batch)[1])(run.params)
    assert_same((loss, grads), (value, expected))
    assert_same(sf.grad(run.fn)(run.state, run.params, *batch)[1], expected)


def test_the_state_through_has_aux_keeps_the_forward_amaxes() -> None:
    run, batch = warm()
    staged, _ = sf.value_and_grad(run.fn, accumulate=True)(run.state, run.params, *batch)
    _, state = grad(lambda params: run.fn(run.state, params, *batch)[::-1], has_aux=True)(run.params)
    for site, roles in scales(state).items():
        assert roles["input"] == scales(staged)[site]["input"]
        assert roles["weight"] == scales(staged)[site]["weight"]
        assert roles["grad_output"] == scales(run.state)[site]["grad_output"]
    assert not any(tensor.requires_grad for tensor in tensors(state))
    for site, roles in scales(sf.update_scales(state)).items():
        assert roles["input"]["history"][0] == newest(state)[site]["input"] != newest(run.state)[site]["input"]
        assert roles["grad_output"] == scales(run.state)[site]["grad_output"]


@pytest.mark.parametrize("argnums", [1, (0, 1)])
def test_gradients_of_inputs(argnums: Any) -> None:
    run, (x, y) = warm()
    _, (_, slopes) = sf.value_and_grad(run.fn, argnums=argnums)(run.state, run.params, x, y)
    expected = grad(lambda params, x: run.fn(run.state, params, x, y)[1], argnums=argnums)(run.params, x)
    assert_same(slopes, expected)
    assert all(slope.any() for slope in tensors(slopes))


def test_has_aux_and_a_function_of_ones_own() -> None:
    run, batch = warm()

    def doubled(state: sf.CompilerState, params: Any, x: Tensor, y: Tensor) -> Any:
        state, loss = run.fn(state, params, x, y)
        return state, (2 * loss, loss)

    state, ((twice, loss), slopes) = sf.value_and_grad(doubled, has_aux=True)(run.state, run.params, *batch)
    alone, (value, expected) = sf.value_and_grad(run.fn)(run.state, run.params, *batch)
    assert_same((twice, loss), (2 * value, value))
    for site, roles in newest(state).items():
        assert roles["input"] == newest(alone)[site]["input"]
        assert roles["grad_output"] == 2 * newest(alone)[site]["grad_output"]
    assert {key: slope.shape for key, slope in slopes.items()} == {key: own.shape for key, own in expected.items()}


@pytest.mark.parametrize(("name", "kind"), NETWORKS)
def test_per_sample_gradients_equal_the_loop(name: str, kind: str) -> None:
    run, batch = warm(kind, name)
    loss = lambda params, x, y: run.fn(run.state, params, x, y)[1]  # noqa: E731
    if name == "block":
        batch = tuple(one[:, None] for one in batch)
    actual = vmap(grad(loss), in_dims=(None, 0, 0))(run.params, *batch)
    expected = joined([grad(loss)(run.params, x, y) for x, y in zip(*batch, strict=True)])
    assert_same(actual, expected, **CLOSE)
    assert run.fn.cache_info().eager_calls == 0


@pytest.mark.parametrize("way", ["sf.vmap", "torch.vmap", "torch.vmap of chunks"])
def test_amaxes_of_per_sample_gradients_are_the_largest_of_the_loop(way: str) -> None:
    run, batch = warm()
    step = sf.value_and_grad(run.fn, accumulate=True)
    if way == "sf.vmap":
        step = sf.value_and_grad(run.fn)
        state, (losses, slopes) = sf.vmap(step, in_dims=(None, 0, 0))(run.state, run.params, *batch)
    else:
        chunks = {"chunk_size": 2} if way.endswith("chunks") else {}
        call = vmap(lambda x, y: step(run.state, run.params, x, y), **chunks)
        states, (losses, slopes) = call(*batch)
        state = sf.merge(states)
    alone = one_at_a_time(run, batch, sf.value_and_grad(run.fn, accumulate=True))
    assert_same((losses, slopes), joined([out for _, out in alone]), **CLOSE)
    expected = largest([newest(one) for one, _ in alone])
    for site, roles in newest(state).items():
        assert roles == pytest.approx(expected[site], rel=1e-5)
    assert sf.state.tree_structure(state) == sf.state.tree_structure(run.state)
    assert_same(state.fp8[run.fn.owner].scale, run.state.fp8[run.fn.owner].scale)
    trained(Run(sf.update_scales(state), run.fn, run.params), [batch])


def test_amaxes_stay_apart_until_they_are_merged() -> None:
    run, (x, y) = warm()
    factors = torch.tensor([1.0, 3.0, 2.0])
    leaves = {name: own.clone().requires_grad_() for name, own in run.params.items()}
    states, losses = vmap(lambda factor: run.fn(run.state, leaves, factor * x, y))(factors)
    assert_same(losses, torch.stack([run.fn(run.state, leaves, factor * x, y)[1] for factor in factors]), **CLOSE)
    part = states.fp8[run.fn.owner]
    column = list(part.columns).index(("net.0", "input"))
    assert_same(part.amax_history[:, 0, column], factors * x.abs().max(), rtol=1e-6)
    merged = sf.merge(states).fp8[run.fn.owner]
    assert_same(merged.amax_history, part.amax_history.amax(0))
    assert_same(merged.scale, run.state.fp8[run.fn.owner].scale)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_with_one_state_equals_the_loop(kind: str) -> None:
    run, (x, y) = warm(kind)
    outputs = vmap(lambda x, y: run.fn(run.state, run.params, x, y)[1])(x, y)
    assert_same(outputs, torch.stack([out for _, out in one_at_a_time(run, (x, y), run.fn)]), **CLOSE)
    state, mapped = sf.vmap(run.fn, in_dims=(None, 0, 0))(run.state, run.params, x, y)
    assert_same(mapped, outputs)
    assert sf.tree_equal(state, run.state)


def test_an_ensemble_has_a_state_for_each_member() -> None:
    run, batch = warm()
    members = [(run.state, run.params), (trained(run, [batch])[0].state, {k: 2 * p for k, p in run.params.items()})]
    states, params = (joined([member[part] for member in members]) for part in (0, 1))
    many = sf.vmap(sf.value_and_grad(run.fn, accumulate=True), in_dims=(0, None, None), state_dim=0)
    after, (losses, _) = many(states, params, *batch)
    for index, (state, own) in enumerate(members):
        alone, (loss, _) = sf.value_and_grad(run.fn, accumulate=True)(state, own, *batch)
        assert_same(losses[index], loss, **CLOSE)
        actual, expected = after.fp8[run.fn.owner], alone.fp8[run.fn.owner]
        assert_same(actual.amax_history[index], expected.amax_history, **CLOSE)
        assert_same(actual.scale[index], expected.scale)


def test_repeated_transforms_compile_nothing_new() -> None:
    run, batch = warm()
    many = sf.vmap(sf.value_and_grad(run.fn), in_dims=(None, 0, 0))
    many(run.state, run.params, *batch)
    before = run.fn.cache_info()
    many(run.state, run.params, *batch)
    after = run.fn.cache_info()
    assert (after.captures, after.compiled_graphs, after.eager_calls) == (before.captures, before.compiled_graphs, 0)
