"""Guided passes in a list: what they need and exclude, own ones, and all of them together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.helpers import assert_same
from tests.lifecycles.engines import KINDS, Regression, batch, trainer
from tests.lifecycles.graphs import backward_of, saved_bytes, sine_pass, split_of
from tests.lifecycles.networks import NETWORKS, assert_same_training, plain
from tests.lifecycles.watching import Watching

pytestmark = pytest.mark.usefixtures("one_thread")
BUDGET, ORDER, OFFLOAD = sf.passes.memory_budget, sf.passes.order_for_memory, sf.passes.offload_saved
UNMET = "ignore:Expected at most .* saved bytes:UserWarning"


@dataclass(frozen=True)
class Sine(sf.passes.GuidedPass):
    """Needs another one before it; seen in the numbers."""

    name: ClassVar[str] = "sine"
    requires: ClassVar[frozenset[str]] = frozenset({"order_for_memory"})

    def passes(self, profile: sf.Profile | None) -> sf.Passes:
        assert profile is None, "it asks for none"
        return sf.Passes(captured=sine_pass)


@dataclass(frozen=True)
class Looking(sf.passes.GuidedPass):
    """Looks at the profile that it asks for, and changes nothing."""

    seen: Callable[[sf.Profile | None], None]

    name: ClassVar[str] = "looking"
    requires: ClassVar[frozenset[str]] = frozenset({"profile"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"offload_saved"})

    def passes(self, profile: sf.Profile | None) -> sf.Passes:
        self.seen(profile)
        return sf.Passes()


def ignored(_: sf.Profile | None) -> None:
    raise AssertionError("nothing may run before the list is checked")


def never(*_: Any) -> Any:
    raise AssertionError("nothing may run before the list is checked")


REFUSED: dict[str, tuple[Any, str]] = {
    "two budgets": ([BUDGET(0.5), BUDGET(0.5)], r"Expected 'memory_budget' without 'memory_budget', got both"),
    "a budget and a partition": (
        [BUDGET(0.5), sf.Passes(partition=never)],
        r"Expected .*without 'partition', got both",
    ),
    "a partition and a budget": (
        [sf.Passes(partition=never), BUDGET(0.5)],
        r"Expected .*without 'partition', got both",
    ),
    "two partitions": ([sf.Passes(partition=never)] * 2, r"Expected one Passes\(partition"),
    "what is needed is missing": ([Sine()], r"Expected 'order_for_memory' before 'sine', got"),
    "what is needed comes later": ([Sine(), ORDER()], r"Expected 'order_for_memory' before 'sine', got"),
    "own conflict": ([Looking(ignored), OFFLOAD(1)], r"Expected 'looking' without 'offload_saved', got both"),
    "own conflict, reversed": ([OFFLOAD(1), Looking(ignored)], r"Expected 'looking' without 'offload_saved'"),
    "no pass": ([BUDGET(0.5), never], r"Expected passes as Passes, guided passes or a sequence of them, got"),
    "no list": (never, r"Expected passes as Passes, guided passes or a sequence of them, got"),
}


def refused(way: str, model: nn.Module, asked: Any, watching: Watching) -> None:
    """Asks for passes in one of the ways there are."""
    if way == "engine":
        sf.Engine(model, batch(0), backend=watching, passes=asked)
    elif way == "schedule":
        sf.compile(sf.init_state(), model, batch(0), backend=watching, schedule=sf.Schedule([(0, asked)]))
    else:
        sf.compile(sf.init_state(), model, batch(0), backend=watching, passes=asked)


@pytest.mark.parametrize("way", ["compile", "engine", "schedule"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_list_that_does_not_fit_is_refused_before_anything_runs(name: str, way: str) -> None:
    (asked, text), watching, model = REFUSED[name], Watching(), Regression(0)
    model.register_forward_pre_hook(never)
    with pytest.raises(sf.SpecError, match=text):
        refused(way, model, asked, watching)
    assert watching.graphs == []


def test_a_recompile_with_a_list_that_does_not_fit_is_refused_before_anything_runs() -> None:
    watching = Watching()
    one = trainer("autograd", backend=watching)
    graphs, state = list(watching.graphs), one.world.state
    for asked, text in REFUSED.values():
        with pytest.raises(sf.SpecError, match=text):
            one.recompile(asked)
    assert watching.graphs == graphs
    assert one.world.state is state


@pytest.mark.parametrize("kind", KINDS)
def test_an_own_guided_pass_is_applied_after_what_it_needs(kind: str) -> None:
    plain, ours, by_hand = (
        trainer(kind, passes=passes) for passes in (sf.Passes(), [ORDER(), Sine()], sf.Passes(captured=sine_pass))
    )
    for one in (plain, ours, by_hand):
        one.train(batch(0))
    assert_same(ours.outcome(), by_hand.outcome())
    assert not torch.equal(ours.losses[0], plain.losses[0])


@pytest.mark.parametrize("kind", KINDS)
def test_an_own_guided_pass_gets_a_complete_profile(kind: str) -> None:
    seen = list[sf.Profile | None]()
    one = trainer(kind, passes=[ORDER(), Looking(seen.append)])
    assert [profile is not None and profile.complete for profile in seen] == [True]
    assert seen[0] is not None
    assert {node.graph for node in seen[0].nodes} == {"forward", "backward"}
    _, given = sf.profile(one.world.state, one.fn)
    if kind != "engine":
        sf.recompile(one.world.state, one.fn, [Looking(seen.append)], profile=given)
        assert seen[1] is given, "a profile that was handed over is not made again"


def test_an_own_guided_pass_must_return_passes() -> None:
    @dataclass(frozen=True)
    class Wrong(sf.passes.GuidedPass):
        name: ClassVar[str] = "wrong"

        def passes(self, profile: sf.Profile | None) -> sf.Passes:
            return "nothing"  # type: ignore[return-value]

    with pytest.raises(sf.SpecError, match=r"Expected wrong.passes\(profile\) to return Passes, got a str"):
        trainer("autograd", passes=[Wrong()])


@pytest.mark.filterwarnings(UNMET)
@pytest.mark.parametrize("name", NETWORKS)
def test_all_three_together_give_the_same_bits(name: str) -> None:
    assert_same_training(name, [BUDGET(0.5), ORDER(), OFFLOAD(500)])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_three_together_hold_each_promise_in_any_order(order: tuple[int, ...]) -> None:
    every = [BUDGET(0.5), ORDER(), OFFLOAD(500)]
    _, fn = NETWORKS["mlp"].compiled([every[at] for at in order])
    assert saved_bytes(fn) + split_of(fn).offloaded_bytes <= saved_bytes(plain("mlp")[1]) / 2
    assert split_of(fn).offloaded_bytes >= 500
    for gm in (fn.forward_graph.gm, backward_of(fn)):
        gm.graph.lint()


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_of_guided_passes_changes_no_bit(kind: str) -> None:
    schedule = sf.Schedule([(0, sf.Passes()), (1, [BUDGET(0.3), ORDER()]), (3, [OFFLOAD(2**30)])])
    ours, plain = trainer(kind, schedule=schedule), trainer(kind)
    for number in range(5):
        ours.advance(number)
        for one in (ours, plain):
            one.train(batch(number))
    assert_same(ours.outcome(), plain.outcome())
    assert ours.fn.entry == 2
