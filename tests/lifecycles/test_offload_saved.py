"""`offload_saved`: what waits for the backward waits on the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import scoped_fn as sf
from tests.helpers import assert_same, fresh
from tests.lifecycles.graphs import backward_of, returned, split_of
from tests.lifecycles.networks import NETWORKS, assert_same_training, plain

pytestmark = pytest.mark.usefixtures("one_thread")
OFFLOAD = sf.passes.offload_saved
EVERYTHING = 2**40


def saved_sizes(fn: sf.CompiledFn) -> list[int]:
    """Bytes of each saved value that is no parameter and no input."""
    values = returned(fn.forward_graph.gm)[split_of(fn).joint.num_forward :]
    return [node.meta["val"].nbytes for node in values if node.op != "placeholder"]


@pytest.mark.parametrize(("name", "wanted"), [*((name, EVERYTHING) for name in NETWORKS), ("mlp", 1), ("fp8", 100)])
def test_training_with_offloaded_values_has_the_same_bits(name: str, wanted: int) -> None:
    assert_same_training(name, [OFFLOAD(wanted)])


@pytest.mark.parametrize("name", ["mlp", "batch norm", "fp8"])
def test_at_least_what_was_asked_for_goes_and_no_more_than_needed(name: str) -> None:
    without, sizes = split_of(plain(name)[1]), saved_sizes(plain(name)[1])
    assert without.offloaded_bytes == 0
    movable = split_of(NETWORKS[name].compiled(OFFLOAD(EVERYTHING))[1]).offloaded_bytes
    assert movable > 0
    for wanted in (0, 1, movable // 2):
        split = split_of(NETWORKS[name].compiled(OFFLOAD(wanted))[1])
        assert split.saved_bytes + split.offloaded_bytes == without.saved_bytes
        assert wanted <= split.offloaded_bytes < wanted + max(sizes)
        assert wanted > 0 or split.offloaded_bytes == 0


def three(weight: Tensor) -> Tensor:
    """Saves three values; the first is used last in the backward."""
    first = weight.exp()
    second = first.sin()
    return second.exp().sum()


def test_what_waits_longest_goes_first() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    state, without = sf.compile(sf.init_state(), three, (weight,), backend="eager")
    assert saved_sizes(without) == [256] * len(split_of(without).saved)
    _, fn = sf.compile(state, three, (weight,), backend="eager", passes=OFFLOAD(1))
    assert split_of(fn).offloaded_bytes == 256
    moved = [node for node in fn.forward_graph.gm.graph.nodes if node.meta.get("offloaded")]
    (source,) = moved[0].all_input_nodes
    assert len(moved) == 1
    assert source.name == last_used(without)


def last_used(fn: sf.CompiledFn) -> str:
    """The name of the saved value whose first use in the backward comes last."""
    graph = backward_of(fn).graph
    place = {node: at for at, node in enumerate(graph.nodes)}
    saved = graph.find_nodes(op="placeholder")[: len(split_of(fn).saved)]
    return str(max(saved, key=lambda node: min(place[user] for user in node.users)).name)


def test_a_value_comes_back_right_before_its_first_use() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    _, fn = sf.compile(sf.init_state(), three, (weight,), backend="eager", passes=OFFLOAD(EVERYTHING))
    graph = backward_of(fn).graph
    nodes = list(graph.nodes)
    copies = [node for node in nodes if node.target is torch.ops.aten.clone.default]
    assert len(copies) == len(split_of(fn).saved) > 1
    for copy in copies:
        assert nodes[nodes.index(copy) + 1] in copy.users or copy.next in copies
    graph.lint()


def test_the_parameters_and_the_inputs_stay_where_they_are() -> None:
    _, fn = NETWORKS["mlp"].compiled(OFFLOAD(EVERYTHING))
    placeholders = {node.name for node in fn.forward_graph.gm.graph.find_nodes(op="placeholder")}
    moved = [node for node in fn.forward_graph.gm.graph.nodes if node.meta.get("offloaded")]
    assert moved
    assert not any(node.all_input_nodes[0].name in placeholders for node in moved)
    assert split_of(fn).saved_bytes == 0
    assert split_of(fn).offloaded_bytes == sum(node.meta["val"].nbytes for node in moved)


def test_offloading_by_inductor() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    state, fn = sf.compile(sf.init_state(), three, (weight,), backend="inductor", passes=OFFLOAD(EVERYTHING))
    ours, theirs = fresh(weight), fresh(weight)
    fn(state, ours)[1].backward()
    three(theirs).backward()  # type: ignore[no-untyped-call]
    assert_same(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wanted", [-1, 0.5, True, None, "1"])
def test_no_whole_number_of_bytes_is_refused(wanted: object) -> None:
    with pytest.raises(sf.SpecError, match=r"Expected a whole number of bytes, 0 or more, got "):
        OFFLOAD(wanted)  # type: ignore[arg-type]
