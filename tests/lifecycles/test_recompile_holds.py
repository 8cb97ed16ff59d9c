"""What recompile, advance and profile hold to, whatever surrounds the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scoped_fn as sf
from tests.helpers import assert_same, compiled, process_unchanged

BUDGET = sf.passes.memory_budget(0.2)
KEY = "torch._inductor.config.max_autotune"


class Asks(nn.Module):
    """Looks at autocast and the default dtype while it is captured."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 2 if torch.is_autocast_enabled("cpu") else 1
        return x * factor + torch.ones(3).element_size()


def test_a_recompile_outside_autocast_is_for_calls_inside() -> None:
    x = torch.ones(3)
    with torch.autocast("cpu"):
        state, fn = sf.compile(sf.init_state(), Asks(), (x,), backend="eager")
        expected = fn(state, {}, x)[1]
    state, fn = sf.recompile(state, fn)
    assert_same(fn(state, {}, x)[1], torch.full((3,), 5.0))
    with torch.autocast("cpu"):
        assert_same(fn(state, {}, x)[1], expected)


def test_another_default_dtype_is_refused() -> None:
    state, fn = compiled(Asks(), (torch.ones(3),))
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(sf.SpecError, match=r"Expected the default dtype torch.float32 .*, got torch.float64"):
            sf.recompile(state, fn)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap], ids=["grad", "vmap"])
def test_a_recompile_inside_a_transform_does_not_see_it(transform: Any) -> None:
    state, fn = compiled(nn.Linear(6, 6), (torch.randn(2, 6),))
    made: list[sf.CompiledFn] = []

    def inside(x: Tensor) -> Tensor:
        made.append(sf.recompile(state, fn, BUDGET)[1])
        return x.sum()

    with process_unchanged():
        transform(inside)(torch.ones(2, 6))
    x = torch.randn(2, 6)
    assert_same(made[0](state, fn.params, x)[1], fn(state, fn.params, x)[1])


def test_made_up_inputs_ignore_the_default_device() -> None:
    state, fn = compiled(nn.Linear(2, 2), (torch.ones(1, 2),))
    with torch.device("meta"):
        assert sf.profile(state, fn)[1].complete


def test_made_up_inputs_may_share_memory_as_the_real_ones_did() -> None:
    x = torch.randn(1, 4).expand(3, 4)
    state, fn = compiled(lambda x: x.sin(), (x,))
    state = sf.push_inputs(state, fn, (x,))
    state, _ = sf.take_inputs(state, fn)
    state, profile = sf.profile(state, fn)
    assert profile.complete
    assert profile.synthetic
    (made,) = sf.materialize(sf.take_inputs(state, fn)[1])
    assert made.stride() == x.stride()


def test_both_words_of_a_key_count() -> None:
    state, fn = compiled(lambda x: x.sin(), (torch.ones(4),))
    spec = sf.take_inputs(sf.take_inputs(sf.push_inputs(state, fn, (torch.ones(4),)), fn)[0], fn)[1]
    made = [sf.materialize(spec, key)[0] for key in (7, 7, 7 + 2**40)]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


@pytest.mark.parametrize("level", ["captured", "joint", "forward", "backward", "saved", "partition"])
def test_passes_run_under_their_owners_overrides(level: str) -> None:
    from torch._inductor import config

    seen: list[bool] = []

    def look(*given: Any) -> Any:
        seen.append(config.max_autotune)
        return given[0] if len(given) == 1 else given[:2]

    def cut(*given: Any) -> Any:
        from scoped_fn._torch.aot import partition_with_min_cut

        return look(*partition_with_min_cut(*given), 0)

    state, owner = sf.acquire(sf.init_state(), "seen")
    state = sf.set_override(state, owner, KEY, value=True)
    passes = sf.Passes(**{level: cut if level == "partition" else look})
    sf.compile(state, nn.Linear(2, 2), (torch.ones(1, 2),), backend="eager", owner=owner, passes=passes)
    assert seen == [True]
    assert config.max_autotune is False


def test_an_engine_is_recompiled_in_all_modes_or_in_none() -> None:
    calls: list[torch.fx.GraphModule] = []

    def second_fails(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        calls.append(gm)
        if len(calls) == 2:
            raise ZeroDivisionError
        return gm

    engine = sf.Engine(nn.Linear(2, 2), (torch.ones(1, 2),), backend="eager")
    engine.eval()
    before = engine.fn, engine.train().fn, engine.state
    with pytest.raises(ZeroDivisionError):
        engine.recompile(sf.Passes(forward=second_fails))
    assert engine.state is before[2]
    assert (engine.eval().fn, engine.train().fn) == before[:2]


def test_passes_by_hand_hold_until_the_next_advance_in_every_mode() -> None:
    schedule = sf.Schedule([(0, BUDGET)])
    engine = sf.Engine(nn.Linear(2, 2), (torch.ones(1, 2),), backend="eager", schedule=schedule)
    assert engine.fn.entry == 0
    engine.recompile(())
    assert [engine.fn.entry, engine.eval().fn.entry] == [None, None]
    engine.advance(1)
    assert [engine.fn.entry, engine.train().fn.entry] == [0, 0]
