"""`order_for_memory`: the same operations, the same bits, a peak that is not above."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import scoped_fn as sf
from tests.helpers import fresh
from tests.lifecycles.graphs import backward_of
from tests.lifecycles.networks import NETWORKS, assert_same_training, plain
from tests.lifecycles.peaks import peak_of, peak_of_graph

pytestmark = pytest.mark.usefixtures("one_thread")
ORDER = sf.passes.order_for_memory
KIB = 1024


def operations(graph: sf.Graph | None) -> list[str]:
    assert graph is not None
    return sorted(str(node.target) for node in graph.gm.graph.nodes if node.op == "call_function")


def assert_runs_in_order(graph: sf.Graph | None) -> None:
    """Every value is made before it is used, and the graph is a valid one."""
    assert graph is not None
    graph.gm.graph.lint()
    made = set[torch.fx.Node]()
    for node in graph.gm.graph.nodes:
        assert made.issuperset(node.all_input_nodes), node
        made.add(node)


def values_for(gm: torch.fx.GraphModule) -> list[Tensor]:
    """Tensors that a graph can run on, where all of them are floating point."""
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return [torch.full(fake.shape, 0.5, dtype=fake.dtype) for fake in fakes]


@pytest.mark.parametrize("name", NETWORKS)
def test_training_in_the_new_order_has_the_same_bits(name: str) -> None:
    assert_same_training(name, [ORDER()])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_new_order_is_a_valid_one_whose_profiled_peak_is_not_above(name: str) -> None:
    both = plain(name), NETWORKS[name].compiled(ORDER())
    for at in ("forward_graph", "backward_graph"):
        other, graph = (getattr(fn, at) for _, fn in both)
        assert_runs_in_order(graph)
        assert operations(graph) == operations(other)
        assert (graph.inputs, graph.outputs) == (other.inputs, other.outputs)
    given, ordered = (sf.profile(*each)[1] for each in both)
    for part in ("forward", "backward"):
        peaks = [max(n.peak_bytes for n in each.nodes if n.graph == part) for each in (given, ordered)]
        assert peaks[1] <= peaks[0], part


def wasteful(x: Tensor) -> Tensor:
    """Makes four large values, and only then adds up each."""
    large = [x.exp(), x.sin(), x.cos(), x.tanh()]
    return torch.stack([one.sum() for one in large]).sum()


def test_a_graph_with_a_better_order_is_improved() -> None:
    x = torch.randn(64, 256)  # 64 KiB
    with torch.no_grad():
        peaks = []
        for passes in (sf.Passes(), ORDER()):
            state, fn = sf.compile(sf.init_state(), wasteful, (x,), backend="eager", passes=passes)
            peaks.append(peak_of(lambda state=state, fn=fn: fn(state, x), x))  # type: ignore[misc]
            assert peak_of_graph(fn.forward_graph.gm, [x]) == peaks[-1]
            assert torch.equal(fn(state, x)[1], wasteful(x))
    assert peaks[0] >= 4 * 64 * KIB
    assert peaks[1] <= 2 * 64 * KIB + 4 * KIB, "one large value at a time, and the next one's"


def test_a_backward_with_a_better_order_is_improved() -> None:
    """Gradients of several small weights by way of large ones, which are all made before the first is used."""
    weights = [torch.randn(256, requires_grad=True) for _ in range(4)]

    def tied(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """All reductions at the end: the order that nobody would want."""
        gm = sf.copy_graph(gm)
        for node in list(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)):
            followers = [user for user in node.users if user.op != "output"]
            for moved in [node, *followers]:
                gm.graph.output_node().prepend(moved)
        gm.recompile()
        return gm

    def function(weights: list[Tensor], x: Tensor) -> Tensor:
        total = x
        for one in weights:
            total = (total * one).tanh()
        return total.sum()

    x = torch.randn(64, 256)
    peaks, grads = [], []
    both: list[Any] = [[sf.Passes(backward=tied)], [sf.Passes(backward=tied), ORDER()]]
    for asked in both:
        own = fresh(weights)
        state, fn = sf.compile(sf.init_state(), function, (own, x), backend="eager", passes=asked)
        assert_runs_in_order(fn.backward_graph)
        peaks.append(peak_of_graph(backward_of(fn), values_for(backward_of(fn))))
        fn(state, own, x)[1].backward()
        grads.append([one.grad for one in own])
    assert peaks[1] < peaks[0]
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_random_operations_keep_their_turn() -> None:
    """The first number drawn is needed last: it would be drawn last, if its turn did not matter."""

    def noisy(x: Tensor) -> Tensor:
        large, first, second = x.exp(), torch.rand_like(x), torch.rand_like(x)
        return (large * second).sum() + (first * x).sum()

    x, found, drawn = torch.randn(64, 64), [], []
    for passes in (sf.Passes(), ORDER()):
        state, fn = sf.compile(sf.init_state(), noisy, (x,), backend="eager", rng="torch", passes=passes)
        torch.manual_seed(3)
        found.append(fn(state, x)[1])
        tag = torch.Tag.nondeterministic_seeded
        drawn.append([node.name for node in fn.forward_graph.gm.graph.nodes if tag in getattr(node.target, "tags", ())])
    assert torch.equal(*found)
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 2
