"""`to_tensors` and `from_tensors`: the leaves of a state by name, for other stores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given

import scoped_fn as sf
from scoped_fn.interop import torch_to_jax
from tests.checkpoint.values import exact, states, tensor_of
from tests.generators.arrays import kept
from tests.helpers import assert_disjoint, compiled
from tests.state.whole import whole_state

# torch says so of a process that is not part of a group, which is what is tested.
ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
# torch says so once in a process, wherever it first makes such a tensor.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
NAMES = [
    *("key", "buffers.0.mean", "buffers.0.count", "fp8.0.scale", "fp8.0.amax_history", "fp8.0.grad_sink"),
    *("inputs.0.entries.0.0", "inputs.0.entries.0.1", "inputs.0.entries.1.0", "inputs.0.spec.0"),
]


def blank(state: sf.CompilerState) -> sf.CompilerState:
    """The state with other values in every tensor."""
    others = {name: tensor_of(value.dtype, value.shape, 5) for name, value in sf.to_tensors(state).items()}
    return sf.from_tensors(state, others)


def test_names_of_a_whole_state() -> None:
    state = whole_state()
    with kept(state):
        found = sf.to_tensors(state)
    assert list(found) == NAMES
    for leaf in sf.state.tree_leaves(state):
        assert_disjoint(found, leaf)
    assert len(found) == len(sf.state.tree_leaves(state))


@given(states())
def test_there_and_back(state: sf.CompilerState) -> None:
    found = sf.to_tensors(state)
    again = sf.from_tensors(blank(state), found)
    assert exact(again) == exact(state)
    assert_disjoint(found, sf.state.tree_leaves(again))
    assert exact(sf.to_tensors(again)) == exact(found)


def test_gradients_are_left_behind() -> None:
    state = sf.set_buffers(*sf.acquire(sf.init_state(), "a"), {"mean": torch.ones(2, requires_grad=True)})
    found = sf.to_tensors(state)
    assert not found["buffers.0.mean"].requires_grad
    assert (
        not sf.from_tensors(state, {**found, "buffers.0.mean": torch.ones(2, requires_grad=True)})
        .buffers[0]["mean"]
        .requires_grad
    )


def test_scales_that_owners_share_are_there_once() -> None:
    state = whole_state()
    state = replace(state, fp8=state.fp8.set(1, state.fp8[0]))
    found = sf.to_tensors(state)
    assert list(found) == NAMES
    again = sf.from_tensors(state, {**found, "fp8.0.scale": torch.full((2,), 5.0)})
    assert again.fp8[1] is again.fp8[0]
    assert again.fp8[0].scale.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": None}, r"got other names \(missing: key\)\. Use a state of the same program\."),
        ({"more": torch.ones(1)}, r"got other names \(unknown: more\)\."),
        ({"key": None, "k": torch.ones(1), "fp8.0.scale": None}, r"\(missing: key, fp8\.0\.scale; unknown: k\)\."),
        ({f"a{i}": torch.ones(1) for i in range(9)}, r"\(unknown: a0, a1, a2, a3, a4 and 4 more\)\."),
        ({"key": torch.zeros(2)}, r"Expected key to be uint32\[2\], got float32\[2\]\. Use a state of the same"),
        ({"key": torch.zeros(3, dtype=torch.uint32)}, r"Expected key to be uint32\[2\], got uint32\[3\]\."),
        ({"fp8.0.scale": torch.ones(2, 1)}, r"Expected fp8\.0\.scale to be float32\[2\], got float32\[2, 1\]\."),
        ({"fp8.0.scale": [1.0, 1.0]}, r"Expected fp8\.0\.scale to be float32\[2\], got a list\."),
    ],
)
def test_tensors_of_another_state(changes: dict[str, torch.Tensor], words: str) -> None:
    state = whole_state()
    found = {name: value for name, value in {**sf.to_tensors(state), **changes}.items() if value is not None}
    with kept(state), pytest.raises(sf.SpecError, match=words):
        sf.from_tensors(state, found)


def test_what_is_no_state() -> None:
    for call in (lambda: sf.to_tensors(3), lambda: sf.from_tensors({}, {})):  # type: ignore[arg-type]
        with pytest.raises(sf.SpecError, match="Expected a CompilerState"):
            call()


@ALONE
def test_through_torchs_distributed_checkpoint(tmp_path: Path) -> None:
    state = whole_state()
    state = replace(state, key=torch.tensor([2**32 - 1, 7], dtype=torch.uint32))
    dcp.save(sf.to_tensors(state), checkpoint_id=tmp_path / "saved")
    after = blank(state)
    with kept(after):  # torch loads in place: into copies
        tensors = sf.to_tensors(after)
        dcp.load(tensors, checkpoint_id=tmp_path / "saved")
    assert exact(sf.from_tensors(after, tensors)) == exact(state)


class Squares(torch.nn.Module):
    """A loss with FP8 sites and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


@ALONE
def test_saved_before_the_first_step_and_loaded_after_it(tmp_path: Path) -> None:
    x = torch.randn(8, 16)
    state = sf.autocast(sf.init_state(), sf.DelayedScaling(amax_history_len=4))
    state, fn = sf.compile(state, Squares(), (x,), backend="eager")
    step, before = sf.value_and_grad(fn), sf.to_tensors(state)
    dcp.save(before, checkpoint_id=tmp_path / "saved")
    after = state
    for _ in range(3):
        after, _ = step(after, fn.params, x)
    tensors = sf.to_tensors(after)
    forms = [[(name, value.shape, value.dtype) for name, value in each.items()] for each in (before, tensors)]
    assert forms[0] == forms[1]
    assert exact(tensors) != exact(before)

    dcp.load(tensors, checkpoint_id=tmp_path / "saved")
    again = sf.from_tensors(after, tensors)
    assert exact(again) == exact(state)
    assert exact(step(again, fn.params, x)[1][0]) == exact(step(state, fn.params, x)[1][0])


def test_a_compiled_function_takes_the_state_that_comes_back() -> None:
    state, fn = compiled(torch.nn.BatchNorm1d(4), (torch.randn(8, 4),))
    x = torch.randn(8, 4)
    after, out = fn(state, fn.params, x)
    again, twin = fn(sf.from_tensors(after, sf.to_tensors(state)), fn.params, x)
    assert exact(again) == exact(after)
    assert exact(twin.detach()) == exact(out.detach())


def test_leaves_without_values_are_refused() -> None:
    state = sf.init_state()
    with pytest.raises(sf.SpecError, match="Expected key with values like .*, got a tensor on the meta device"):
        sf.from_tensors(state, {"key": torch.empty(2, dtype=torch.uint32, device="meta")})


def test_a_state_of_another_librarys_arrays_is_refused() -> None:
    state = torch_to_jax(sf.init_state(key=7))
    with pytest.raises(TypeError, match="Expected a state of tensors, got ArrayImpl as key. Convert .*jax_to_torch"):
        sf.to_tensors(state)


def test_leaves_of_another_layout_are_refused() -> None:
    state = sf.set_buffers(*sf.acquire(sf.init_state(), "model"), {"mean": torch.eye(2)})
    sparse = {**sf.to_tensors(state), "buffers.0.mean": torch.eye(2).to_sparse()}
    with pytest.raises(
        sf.SpecError, match="Expected buffers.0.mean with values like .*, got a tensor of layout torch.sp"
    ):
        sf.from_tensors(state, sparse)
