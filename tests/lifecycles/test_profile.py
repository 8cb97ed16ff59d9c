"""`profile`: what each operation costs, against what was worked out by hand and against real runs."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import scoped_fn as sf
from tests.helpers import assert_same, fresh, process_unchanged
from tests.lifecycles.engines import KINDS, alone, assert_as_alone, batch, trainer
from tests.lifecycles.graphs import saved_bytes
from tests.lifecycles.networks import NETWORKS, plain
from tests.lifecycles.peaks import LiveBytes, peak_of

pytestmark = pytest.mark.usefixtures("one_thread")
KB = 4000  # a thousand numbers


def tiny(x: Tensor) -> Tensor:
    doubled = x * 2
    both = doubled.exp() + x
    return both.view(10, 100).sum()


def test_live_bytes_of_a_tiny_graph_are_those_worked_out_by_hand() -> None:
    with torch.no_grad():
        state, fn = sf.compile(sf.init_state(), tiny, (torch.randn(1000),), backend="eager")
        _, profile = sf.profile(state, fn)
    found = [(node.name, node.bytes, node.live_bytes, node.peak_bytes) for node in profile.nodes]
    names = [node.name for node in fn.forward_graph.gm.graph.nodes if node.op == "call_function"]
    expected = [
        (KB, KB, KB),  # x * 2
        (KB, KB, 2 * KB),  # exp: then x * 2 is freed
        (KB, KB, 2 * KB),  # + x: then exp is freed
        (0, KB, KB),  # a view of the same memory
        (4, 4, KB + 4),  # the sum: then its input is freed
    ]
    assert found == [(name, *row) for name, row in zip(names, expected, strict=True)]
    assert (profile.argument_bytes, profile.peak_bytes, profile.saved_bytes) == (KB, 2 * KB, 0)
    assert profile.peak_node is not None
    assert profile.peak_node.name == names[1]
    assert {node.graph for node in profile.nodes} == {"inference"}


def test_live_bytes_of_a_tiny_backward_are_those_worked_out_by_hand() -> None:
    weight = torch.randn(1000, requires_grad=True)
    state, fn = sf.compile(sf.init_state(), lambda weight: weight.exp().exp().sum(), (weight,), backend="eager")
    _, profile = sf.profile(state, fn)
    forward = [(node.bytes, node.live_bytes) for node in profile.nodes if node.graph == "forward" and node.bytes]
    assert forward == [(KB, KB), (KB, 2 * KB), (4, 2 * KB + 4)], "two exponentials are saved, and the loss is an output"
    assert profile.saved_bytes == 2 * KB
    backward = [node for node in profile.nodes if node.graph == "backward"]
    products = [node for node in backward if node.bytes == KB]
    assert [node.live_bytes - (2 * KB + 4) for node in products][-1] <= KB, "one gradient comes out"
    assert max(node.peak_bytes for node in products) - (2 * KB + 4) in (KB, 2 * KB)
    assert all(node.live_bytes >= 2 * KB for node in backward), "what is saved lives until the backward has ended"


@pytest.mark.parametrize("name", NETWORKS)
def test_the_peak_is_within_a_fifth_of_that_of_a_real_run(name: str) -> None:
    state, fn = plain(name)
    params, inputs = fresh(fn.params), NETWORKS[name].inputs()
    state = sf.push_inputs(state, fn, inputs)
    after, profile = sf.profile(state, fn)
    assert (profile.complete, profile.synthetic) == (True, False)

    def real() -> None:
        fn(after, params, *inputs)[1].backward()

    real()
    for own in params.values():
        own.grad = None
    peak = peak_of(real, (params, inputs, after))
    assert profile.peak_bytes <= 1.2 * peak
    assert profile.peak_bytes >= peak / 1.2
    assert peak_of(lambda: sf.profile(state, fn), (params, inputs, state)) <= 1.2 * peak + 1024, "while profiling"


def test_the_measure_of_live_bytes_is_right() -> None:
    x = torch.randn(1000)
    with LiveBytes(x) as counted:
        one = x * 2
        two = one + 1
        view = two.view(10, 100)
        assert counted.live == 2 * KB
        del one, two
        assert counted.live == KB
        del view
        assert counted.live == 0
        x.add_(1)
    assert counted.peak == 2 * KB


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_changes_nothing(kind: str) -> None:
    one = trainer(kind)
    one.train(batch(0))
    state, info = one.world.state, one.fn.cache_info()
    with process_unchanged():
        after, profile = sf.profile(state, one.fn)
    assert after is state
    assert one.fn.cache_info() == info
    one.train(batch(1))
    assert_as_alone(one, kind, 0, [0, 1])
    assert profile.seconds == pytest.approx(sum(node.seconds for node in profile.nodes))
    assert min(node.seconds for node in profile.nodes) > 0


def test_the_inference_graph_on_request() -> None:
    one = trainer("autograd")
    _, training = sf.profile(one.world.state, one.fn)
    _, quiet = sf.profile(one.world.state, one.fn, training=False)
    assert {node.graph for node in training.nodes} == {"forward", "backward"}
    assert {node.graph for node in quiet.nodes} == {"inference"}
    assert quiet.saved_bytes == 0 < training.saved_bytes
    with torch.no_grad():
        state, fn = sf.compile(sf.init_state(), nn.Linear(3, 2).requires_grad_(False), (batch(0)[0],), backend="eager")
    assert {node.graph for node in sf.profile(state, fn)[1].nodes} == {"inference"}


def test_a_profile_as_text_and_as_json() -> None:
    one = trainer("autograd")
    _, profile = sf.profile(one.world.state, one.fn)
    text, content = str(profile), json.loads(profile.to_json())
    slowest = max(profile.nodes, key=lambda node: node.seconds)
    assert slowest.name in text
    assert "made up" in text
    assert content["complete"] is True
    assert content["synthetic"] is True
    assert content["peak_bytes"] == profile.peak_bytes
    assert [node["name"] for node in content["nodes"]] == [node.name for node in profile.nodes]


class Factor(nn.Module):
    """Fails on inputs that are made up: they are not positive definite."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        value = torch.linalg.cholesky(x * self.scale).exp().tanh().sum()
        assert isinstance(value, Tensor)
        return value


def positive_definite() -> Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    return x @ x.T + 4 * torch.eye(4)


def test_a_node_that_fails_ends_the_profile_and_no_training() -> None:
    state, fn = sf.compile(sf.init_state(), Factor(), (positive_definite(),), backend="eager")
    state, profile = sf.profile(state, fn)
    assert (profile.complete, profile.synthetic) == (False, True)
    assert profile.error is not None
    assert "cholesky" in profile.error
    assert len(profile.nodes) < len(list(fn.forward_graph.gm.graph.nodes))
    assert "cholesky" in str(profile)
    with pytest.warns(UserWarning, match=r"Expected a complete profile for the pass memory_budget, got .*cholesky"):
        state, again = sf.recompile(state, fn, [sf.passes.memory_budget(0.0), sf.passes.order_for_memory()])
    found = []
    for each in (fn, again):
        params = fresh(each.params)
        each(state, params, positive_definite())[1].backward()
        found.append(params["scale"].grad)
    assert_same(found[1], found[0])
    assert saved_bytes(again) == saved_bytes(fn), "without the pass that needs the profile"


def test_with_inputs_that_it_can_run_on_the_same_function_is_profiled() -> None:
    state, fn = sf.compile(sf.init_state(), Factor(), (positive_definite(),), backend="eager")
    state = sf.push_inputs(state, fn, (positive_definite(),))
    state, again = sf.recompile(state, fn, sf.passes.memory_budget(0.0))
    assert saved_bytes(again) == 0
    state = sf.push_inputs(state, fn, (positive_definite(),))
    _, profile = sf.profile(state, fn)
    assert (profile.complete, profile.synthetic, profile.error) == (True, False, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_profile_that_is_handed_over_disables_the_pass_alone(kind: str) -> None:
    state, fn = sf.compile(sf.init_state(), Factor(), (positive_definite(),), backend="eager")
    _, failed = sf.profile(state, fn)
    one = trainer(kind)
    if kind == "engine":
        assert one.engine.profile().complete
        return
    with pytest.warns(UserWarning, match="without the pass"):
        one.world.state, one.fn = sf.recompile(one.world.state, one.fn, sf.passes.memory_budget(0.0), profile=failed)
    one.train(batch(0))
    assert_same(one.outcome(), alone(kind, 0, [0]))
