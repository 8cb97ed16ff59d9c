"""`memory_budget`: fewer bytes saved, the same gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.helpers import assert_same
from tests.lifecycles.graphs import backward_of, calls, saved_bytes, split_of
from tests.lifecycles.networks import (
    NETWORKS,
    Network,
    assert_same_training,
    plain,
    plain_training,
    steps_at_once,
    steps_by_autograd,
)
from tests.lifecycles.watching import Watching

pytestmark = pytest.mark.usefixtures("one_thread")
FRACTIONS = (0.0, 0.3, 0.6)
UNMET = "ignore:Expected at most .* saved bytes:UserWarning"
BUDGET = sf.passes.memory_budget


CERTAIN = [name for name in NETWORKS if not NETWORKS[name].random]


@pytest.mark.parametrize("name", CERTAIN)
def test_what_is_saved_keeps_to_the_budget(name: str) -> None:
    state, fn = plain(name)
    state, profile = sf.profile(state, fn)
    most = saved_bytes(fn)
    kept = [saved_bytes(sf.recompile(state, fn, BUDGET(part), profile=profile)[1]) for part in FRACTIONS]
    assert most > 0
    assert [own <= fraction * most for own, fraction in zip(kept, FRACTIONS, strict=True)] == [True] * 3, kept
    assert kept == sorted(kept)


def really_kept(network: Network, passes: Any) -> tuple[int, int]:
    """Bytes of memory that the forward hands to the backward, those of its inputs left out, and how many it says."""
    watching = Watching()
    state, fn = network.compiled(passes, backend=watching)
    _ = fn(state, fn.params, *network.inputs())
    return sum(dict(watching.memory[0][split_of(fn).joint.num_forward :]).values()), saved_bytes(fn)


@pytest.mark.parametrize("name", ["mlp", "gpt", "batch norm"])
def test_the_memory_that_is_really_kept_keeps_to_the_budget(name: str) -> None:
    most, said = really_kept(NETWORKS[name], sf.Passes())
    half, said_half = really_kept(NETWORKS[name], BUDGET(0.5))
    assert half <= most / 2
    assert (said, said_half) == (most, half), "a view of a parameter lives anyway"


@pytest.mark.filterwarnings(UNMET)
@pytest.mark.parametrize(("name", "fraction"), [*((name, 0.0) for name in NETWORKS), ("mlp", 0.5), ("dropout", 0.5)])
def test_gradients_under_a_budget_are_bit_for_bit_those_without(name: str, fraction: float) -> None:
    assert_same_training(name, [BUDGET(fraction)])


def test_gradients_under_a_budget_by_inductor() -> None:
    network = NETWORKS["mlp"]
    state, fn = network.compiled([BUDGET(0.3)], backend="inductor")
    ways = (steps_by_autograd, steps_at_once)
    assert_same([way(network, state, fn) for way in ways], plain_training("mlp")[:2], rtol=1e-3, atol=1e-5)


def test_random_numbers_stay_and_a_budget_that_is_too_small_is_said() -> None:
    network, most = NETWORKS["dropout"], saved_bytes(plain("dropout")[1])
    with pytest.warns(UserWarning, match=r"Expected at most 0 saved bytes, got .*random"):
        _, fn = network.compiled(BUDGET(0.0))
    assert 0 < saved_bytes(fn) < most
    for fraction in (0.9, 1.0):
        assert saved_bytes(network.compiled(BUDGET(fraction))[1]) <= fraction * most


def test_the_whole_budget_changes_nothing() -> None:
    without, whole = plain("mlp")[1], NETWORKS["mlp"].compiled(BUDGET(1.0))[1]
    assert str(whole.forward_graph) == str(without.forward_graph)
    assert str(whole.backward_graph) == str(without.backward_graph)


def two_ways(weight: torch.Tensor) -> torch.Tensor:
    """Saves a product and an exponential; either can be computed again."""
    product = weight @ weight
    exponential = product.exp()
    return (exponential * exponential).sum() + (product * product).sum()


@pytest.mark.parametrize("dear", ["mm", "exp"])
def test_what_is_computed_again_is_what_is_cheap_by_the_profile(dear: str) -> None:
    weight = (torch.randn(32, 32) / 8).requires_grad_()
    state, fn = sf.compile(sf.init_state(), two_ways, (weight,), backend="eager")
    state, profile = sf.profile(state, fn)
    seconds = [1.0 if dear in node.op else 1e-6 for node in profile.nodes]
    nodes = [replace(node, seconds=own) for node, own in zip(profile.nodes, seconds, strict=True)]
    _, half = sf.recompile(state, fn, BUDGET(0.5), profile=replace(profile, nodes=tuple(nodes)))
    again = [
        calls(backward_of(half), op) - calls(backward_of(fn), op)
        for op in (torch.ops.aten.mm.default, torch.ops.aten.exp.default)
    ]
    assert again == ([0, 1] if dear == "mm" else [1, 0])
    assert saved_bytes(half) == saved_bytes(fn) / 2


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "half", True, None])
def test_a_fraction_out_of_range_is_refused(fraction: object) -> None:
    with pytest.raises(sf.SpecError, match=r"Expected a fraction from 0 to 1, got "):
        BUDGET(fraction)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mlp", "fp8"])
def test_a_recompile_under_a_smaller_budget_and_back(name: str) -> None:
    state, fn = plain(name)
    most, text = saved_bytes(fn), str(fn.forward_graph)
    for fraction in (0.5, 0.0):
        state, fn = sf.recompile(state, fn, BUDGET(fraction))
        assert saved_bytes(fn) <= fraction * most
        assert_same(steps_by_autograd(NETWORKS[name], state, fn), plain_training(name)[0])
    state, fn = sf.recompile(state, fn, sf.Passes())
    assert str(fn.forward_graph) == text
