"""Overrides are data: each key counts its owners, and values hold only inside `effects`."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

import scoped_fn as sf
from tests.generators.arrays import kept
from tests.generators.operations import AUTOTUNE, LIMIT
from tests.helpers import process_unchanged
from tests.state.whole import BUDGET, CUDAGRAPHS, owners


def count(state: sf.CompilerState, key: str) -> int:
    return len(state.overrides.get(key, ()))


def test_the_count_of_a_key_is_the_number_of_its_owners() -> None:
    state, *tokens = owners("a", "b", "c")
    assert count(state, AUTOTUNE) == 0
    for number, token in enumerate(tokens, 1):
        state = sf.set_override(state, token, AUTOTUNE, True)
        assert count(state, AUTOTUNE) == number
    for left, token in zip((2, 1, 0), (1, 0, 2), strict=True):
        state = sf.drop_override(state, token, AUTOTUNE)
        assert count(state, AUTOTUNE) == left
    assert state.overrides == {}, "a key without owners is not kept"


def test_two_owners_hold_different_values() -> None:
    state, first, second = owners("a", "b")
    state = sf.set_override(sf.set_override(state, first, LIMIT, 3), second, LIMIT, 4)
    state = sf.set_override(state, second, CUDAGRAPHS, True)
    assert sf.overrides_of(state, first) == {LIMIT: 3}
    assert sf.overrides_of(state, second) == {LIMIT: 4, CUDAGRAPHS: True}
    assert state.overrides == {LIMIT: {first: 3, second: 4}, CUDAGRAPHS: {second: True}}


def test_a_second_value_replaces_the_first_and_counts_once() -> None:
    state, owner = owners("a")
    old = sf.set_override(state, owner, LIMIT, 3)
    with kept(old):
        new = sf.set_override(old, owner, LIMIT, 5)
    assert count(new, LIMIT) == 1
    assert sf.overrides_of(new, owner)[LIMIT] == 5
    assert sf.tree_equal(sf.drop_override(new, owner, LIMIT), state)


def test_a_value_that_is_held_already_gives_the_very_same_state() -> None:
    state, owner = owners("a")
    state = sf.set_override(state, owner, AUTOTUNE, True)
    assert sf.set_override(state, owner, AUTOTUNE, True) is state


def test_dropping_what_is_not_held_is_refused() -> None:
    state, first, second = owners("encoder", "decoder")
    state = sf.set_override(state, first, AUTOTUNE, True)
    for owner, key in ((second, AUTOTUNE), (first, CUDAGRAPHS), (first, "no.such.key")):
        with kept(state), pytest.raises(sf.OwnershipError, match=r"(?s)Expected .*(encoder|decoder).*, got .*"):
            sf.drop_override(state, owner, key)
    state = sf.drop_override(state, first, AUTOTUNE)
    with kept(state), pytest.raises(sf.OwnershipError, match=rf"Expected .*encoder.*{AUTOTUNE}.*, got .*"):
        sf.drop_override(state, first, AUTOTUNE)
    assert count(state, AUTOTUNE) == 0


UNKNOWN = [
    "max_autotune",
    AUTOTUNE + "d",
    "torch._inductor.config",
    "torch._inductor.config.",
    "torch._inductor.config.triton",
    "torch._inductor.config.__name__",
    "torch._inductor.max_autotune",
    "torch.config.max_autotune",
    "",
    None,
    3,
]


@pytest.mark.parametrize("key", UNKNOWN, ids=repr)
def test_an_unknown_key_is_refused_at_once(key: Any) -> None:
    state, owner = owners("a")
    with kept(state), process_unchanged(), pytest.raises(sf.SpecError, match=r"Expected .*setting.*, got .*"):
        sf.set_override(state, owner, key, True)


def test_a_key_with_a_slip_is_told_the_right_one() -> None:
    state, owner = owners("a")
    with pytest.raises(sf.SpecError, match="max_autotune'"):
        sf.set_override(state, owner, "torch._inductor.config.max_autotun", True)


@pytest.mark.parametrize(
    ("key", "value"),
    [(AUTOTUNE, 1), (AUTOTUNE, "yes"), (LIMIT, True), (LIMIT, 2.5), (BUDGET, "half"), (AUTOTUNE, [True]), (LIMIT, {})],
    ids=str,
)
def test_a_value_of_another_type_is_refused_at_once(key: str, value: Any) -> None:
    state, owner = owners("a")
    with kept(state), pytest.raises(sf.SpecError, match=r"Expected .*, got .*"):
        sf.set_override(state, owner, key, value)


def test_an_unhashable_value_is_refused_where_the_default_is_none_too() -> None:
    key = "torch._inductor.config.reorder_prefetch_limit"
    state, owner = owners("a")
    assert inductor_config.reorder_prefetch_limit is None
    assert sf.overrides_of(sf.set_override(state, owner, key, 3), owner) == {key: 3}
    with kept(state), pytest.raises(sf.SpecError, match=r"Expected .*hashable.*, got .*list"):
        sf.set_override(state, owner, key, [3])


def test_the_source_of_random_numbers_is_not_for_overrides() -> None:
    state, owner = owners("a")
    with pytest.raises(sf.SpecError, match=r"Expected .*, got .*fallback_random.*rng="):
        sf.set_override(state, owner, "torch._inductor.config.fallback_random", True)


@pytest.mark.parametrize(
    "operation",
    [
        lambda state, owner: sf.set_override(state, owner, AUTOTUNE, True),
        lambda state, owner: sf.drop_override(state, owner, AUTOTUNE),
        sf.overrides_of,
        lambda state, owner: sf.effects(state, owner).__enter__(),
    ],
    ids=["set", "drop", "overrides_of", "effects"],
)
def test_owners_that_are_not_live_are_refused(operation: Any) -> None:
    state, owner = owners("encoder")
    state = sf.release(sf.set_override(state, owner, AUTOTUNE, True), owner)
    for token, fate in ((owner, "released"), (7, "never")):
        with kept(state), pytest.raises(sf.OwnershipError, match=rf"Expected .*owner {token}.*, got .*{fate}"):
            operation(state, token)


def test_release_drops_the_overrides_of_its_owner_alone() -> None:
    state, first, second = owners("a", "b")
    state = sf.set_override(sf.set_override(state, first, LIMIT, 3), second, LIMIT, 4)
    with kept(old := sf.set_override(state, first, AUTOTUNE, True)):
        after = sf.release(old, first)
    assert after.overrides == {LIMIT: {second: 4}}


def test_setting_and_dropping_touch_nothing_in_the_process() -> None:
    with process_unchanged():
        state, owner = owners("a")
        state = sf.set_override(state, SimpleNamespace(owner=owner), BUDGET, 0.5)
        assert sf.overrides_of(state, SimpleNamespace(owner=owner)) == {BUDGET: 0.5}
        sf.drop_override(state, SimpleNamespace(owner=owner), BUDGET)


def test_values_hold_inside_effects_and_are_undone() -> None:
    state, first, second = owners("a", "b")
    state = sf.set_override(sf.set_override(state, first, LIMIT, 3), first, CUDAGRAPHS, True)
    state = sf.set_override(sf.set_override(state, first, BUDGET, 0.5), second, LIMIT, 4)
    before = dynamo_config.recompile_limit
    with process_unchanged(), kept(state):
        with sf.effects(state, first):
            now = (dynamo_config.recompile_limit, inductor_config.triton.cudagraphs)
            assert (*now, functorch_config.activation_memory_budget) == (3, True, 0.5)
            with sf.effects(state, second):
                assert dynamo_config.recompile_limit == 4
            assert dynamo_config.recompile_limit == 3
        assert dynamo_config.recompile_limit == before


class Boom(Exception):
    """What is raised."""


@pytest.mark.parametrize("exception", [Boom, KeyboardInterrupt, SystemExit], ids=lambda kind: kind.__name__)
def test_effects_are_undone_when_the_block_raises(exception: type[BaseException]) -> None:
    state, owner = owners("a")
    state = sf.set_override(state, owner, AUTOTUNE, True)

    def work() -> None:
        with sf.effects(state, owner):
            assert inductor_config.max_autotune is True
            raise exception("inside")

    with process_unchanged(), pytest.raises(exception, match="inside"):
        work()


def test_effects_hold_in_their_own_thread() -> None:
    state, owner = owners("a")
    state = sf.set_override(state, owner, AUTOTUNE, True)
    seen: list[bool] = []
    with sf.effects(state, owner):
        other = threading.Thread(target=lambda: seen.append(inductor_config.max_autotune))
        other.start()
        other.join()
        assert inductor_config.max_autotune is True
    assert seen == [torch.__version__ < "2.12"], "older torch has one value for all threads"
