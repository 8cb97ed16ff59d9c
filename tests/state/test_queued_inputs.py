"""Queued inputs: each is taken once, then its spec, from which inputs are made up that are marked as such."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import scoped_fn as sf
from tests.generators.arrays import kept
from tests.helpers import assert_same, process_unchanged
from tests.state.whole import leaves_of, owners, whole_state


def pushed(*inputs: Any, **options: Any) -> tuple[sf.CompilerState, int]:
    state, owner = owners("encoder")
    return sf.push_inputs(state, owner, inputs, **options), owner


def spec_of(*inputs: Any, **options: Any) -> sf.InputSpec:
    state, owner = pushed(*inputs, **options)
    spec = sf.take_inputs(sf.take_inputs(state, owner)[0], owner)[1]
    assert isinstance(spec, sf.InputSpec)
    return spec


def test_first_in_first_out_and_each_once() -> None:
    state, owner = owners("a")
    given = [(torch.tensor([float(number)]), number) for number in range(3)]
    for inputs in given:
        with kept(state):
            after = sf.push_inputs(state, owner, inputs)
        state = after
    for inputs in given:
        with kept(state):
            after, taken = sf.take_inputs(state, owner)
        state = after
        assert_same(taken, inputs)
    assert state.inputs[owner].entries == ()


def test_the_very_tensors_are_leaves_of_the_state_and_come_out_again() -> None:
    x, y = torch.ones(2), torch.zeros(3, requires_grad=True)
    state, owner = pushed({"x": x, "rest": [y, 5, None, True, "mode"]})
    leaves = leaves_of(state)
    assert sum(leaf is x for leaf in leaves) == sum(leaf is y for leaf in leaves) == 1
    state, (taken,) = sf.take_inputs(state, owner)
    assert taken["x"] is x
    assert taken["rest"][0] is y
    assert taken["rest"][1:] == [5, None, True, "mode"]
    assert len(leaves_of(state)) == 1, "what was taken is out of the state"


def test_an_empty_queue_gives_the_spec_of_the_newest_as_often_as_asked() -> None:
    state, owner = pushed(torch.ones(2))
    state = sf.push_inputs(state, owner, (torch.ones(4, 5),))
    for _ in range(2):
        state, _ = sf.take_inputs(state, owner)
    for _ in range(3):
        after, spec = sf.take_inputs(state, owner)
        assert after is state
        (made,) = sf.materialize(spec)
        assert made.shape == (4, 5)


def test_keyword_arguments_come_as_the_second_of_a_pair() -> None:
    x, mask = torch.ones(2), torch.tensor([True, False])
    state, owner = owners("a")
    state = sf.push_inputs(state, owner, (x,), {"mask": mask, "scale": 2})
    state, (inputs, kwargs) = sf.take_inputs(state, owner)
    assert_same(inputs, (x,))
    assert_same(kwargs, {"mask": mask, "scale": 2})
    made = sf.materialize(sf.take_inputs(state, owner)[1])
    assert made[0].shape == (2,)
    assert_same(made.kwargs, {"mask": torch.zeros(2, dtype=torch.bool), "scale": 2})


def test_nothing_was_ever_pushed() -> None:
    state, first, second = owners("encoder", "decoder")
    state = sf.push_inputs(state, first, (torch.ones(1),))
    with kept(state), pytest.raises(ValueError, match=r"Expected .*decoder.*, got"):
        sf.take_inputs(state, second)


@pytest.mark.parametrize("inputs", [torch.ones(2), [torch.ones(2)], None, {"x": torch.ones(2)}], ids=type)
def test_inputs_that_are_no_tuple_are_refused(inputs: Any) -> None:
    state, owner = owners("a")
    with kept(state), pytest.raises((TypeError, ValueError), match=r"Expected inputs as a tuple, got"):
        sf.push_inputs(state, owner, inputs)


def test_owners_that_are_not_live_are_refused() -> None:
    state, owner = pushed(torch.ones(2))
    released = sf.release(state, owner)
    assert owner not in released.inputs
    for token, fate in ((owner, "released"), (9, "never")):
        with kept(released), pytest.raises(sf.OwnershipError, match=rf"Expected .*owner {token}.*, got .*{fate}"):
            sf.push_inputs(released, token, (torch.ones(2),))
        with kept(released), pytest.raises(sf.OwnershipError, match=rf"Expected .*owner {token}.*, got .*{fate}"):
            sf.take_inputs(released, token)


def test_another_owner_keeps_its_queue() -> None:
    state = whole_state()
    with kept(state):
        after = sf.take_inputs(sf.push_inputs(state, 1, (torch.ones(9),)), 1)[0]
    assert sf.tree_equal(sf.release(after, 1), sf.release(state, 1))
    assert sf.take_inputs(after, 0)[1][0][0] is sf.take_inputs(state, 0)[1][0][0]


GIVEN = {
    "transposed": torch.randn(4, 6).t(),
    "channels last": torch.ones(2, 3, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
    "every second": torch.ones(10, dtype=torch.float16)[::2],
    "wants gradients": torch.ones(3, dtype=torch.float64, requires_grad=True),
    "integers": torch.tensor([[3, 4]]),
    "small integers": torch.tensor([3], dtype=torch.uint8),
    "truth": torch.tensor(True),
    "empty": torch.ones(0, 3),
    "on meta": torch.ones(2, 3, device="meta"),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_made_up_tensor_looks_like_the_one_pushed(given: torch.Tensor) -> None:
    (made,) = sf.materialize(spec_of(given))
    for name in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(made, name) == getattr(given, name), name
    assert made.stride() == given.stride()
    assert made.is_leaf


def test_made_up_inputs_are_marked_and_keep_plain_data() -> None:
    made = sf.materialize(spec_of(7, {"x": torch.ones(1), "mode": "a"}, None))
    assert isinstance(made, tuple)
    assert type(made) is sf.SyntheticInputs
    assert (made[0], made[1]["mode"], made[2], made.kwargs) == (7, "a", None, {})


def test_made_up_floats_are_standard_normal_and_the_rest_zero() -> None:
    made = sf.materialize(spec_of(torch.ones(100, 100), torch.ones(100, 100), torch.arange(5), torch.ones(2).bool()))
    for one in made[:2]:
        assert abs(one.mean().item()) < 0.05
        assert abs(one.std().item() - 1) < 0.05
    assert not torch.equal(made[0], made[1]), "each tensor has numbers of its own"
    assert_same(made[2:], (torch.zeros(5, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)))


def test_integers_keep_their_values_on_request() -> None:
    ids, on = torch.tensor([[5, 7], [9, 2]]), torch.tensor([True])
    spec = spec_of(ids, torch.ones(3), on, keep_integers=True)
    made = sf.materialize(spec, key=3)
    assert_same(made[0], ids)
    assert not torch.equal(made[1], torch.ones(3)), "floats are made up all the same"
    made[0].zero_()
    assert sf.materialize(spec)[0].tolist() == [[5, 7], [9, 2]], "made-up inputs share no memory with the state"


def test_the_newest_push_decides_whether_integers_are_kept() -> None:
    state, owner = pushed(torch.tensor([5]), keep_integers=True)
    state = sf.push_inputs(state, owner, (torch.tensor([6]),))
    state = sf.take_inputs(sf.take_inputs(state, owner)[0], owner)[0]
    assert sf.materialize(sf.take_inputs(state, owner)[1])[0].tolist() == [0]


def test_the_same_key_makes_the_same_numbers_and_draws_from_no_generator() -> None:
    spec = spec_of(torch.ones(8), {"y": torch.ones(2, 2, dtype=torch.float16)})
    with process_unchanged():
        first = sf.materialize(spec, key=5)
    torch.manual_seed(123)
    assert_same(tuple(sf.materialize(spec, key=5)), tuple(first))
    assert_same(tuple(sf.materialize(spec, sf.init_state(key=5).key)), tuple(first))
    assert_same(tuple(sf.materialize(spec, 0)), tuple(sf.materialize(spec)))
    assert not torch.equal(sf.materialize(spec, key=6)[0], first[0])


def test_what_is_no_spec_is_refused() -> None:
    with pytest.raises((TypeError, ValueError), match=r"Expected .*InputSpec.*, got"):
        sf.materialize((torch.ones(2),))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [-1, 2**64, 1.5, "0", torch.zeros(2), torch.zeros(3, dtype=torch.uint32)], ids=repr)
def test_a_bad_key_is_refused(key: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"Expected a (seed|key).*got"):
        sf.materialize(spec_of(torch.ones(2)), key)
