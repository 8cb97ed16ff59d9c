"""Two hundred functions come and go, and nothing of them stays."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

import scoped_fn as sf

CYCLES, WARM = 200, 50
KINDS = (torch.Tensor, torch.fx.GraphModule, torch.fx.Node, sf.CompiledFn, sf.CompilerState)
X = torch.linspace(-1, 1, 12).reshape(4, 3)


def cycle(number: int) -> None:
    """A function is compiled, trained, compiled again, trained, and released; another lives across it."""
    weight = torch.full((3,), 0.5, requires_grad=True)
    state, fn = sf.compile(sf.init_state(), lambda w, x: (x @ w + number).tanh().sum(), (weight, X), backend="eager")
    state = sf.set_override(state, fn, "torch._dynamo.config.recompile_limit", 5)
    state = sf.push_inputs(state, fn, (weight.detach(), X))
    for step in range(4):
        if step == 2:
            state, fn = sf.recompile(state, fn)
        state, loss = fn(state, weight, X)
        loss.backward()
    state, _ = sf.value_and_grad(fn)(state, weight.detach(), X) if number % 10 == 0 else (state, None)
    state = sf.set_constant(sf.release(state, fn), "cycle", number)
    assert not any((state.owners, state.inputs, state.overrides))


def collect() -> None:
    """Collects until nothing more is found: what dies in a finalizer frees other things."""
    for _ in range(10):
        if not gc.collect():
            return
    raise AssertionError("the collector finds something each time")


def resident_bytes() -> int:
    """The memory of the process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_objects() -> dict[str, int]:
    """How many objects there are of each kind."""
    alive = gc.get_objects()
    # type(): asking some objects of torch for __class__ makes them do something
    return {kind.__name__: sum(issubclass(type(one), kind) for one in alive) for kind in KINDS}


@pytest.mark.usefixtures("one_thread")
def test_memory_stays_flat() -> None:
    for number in range(WARM):
        cycle(number)
    collect()
    objects, memory = count_objects(), resident_bytes()
    for number in range(WARM, CYCLES):
        cycle(number)
    collect()
    assert count_objects() == objects
    assert resident_bytes() < 1.05 * memory
