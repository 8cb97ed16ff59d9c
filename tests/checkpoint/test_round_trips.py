"""What is loaded is what was saved: types, order and every bit."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from safetensors import safe_open

import scoped_fn as sf
from scoped_fn._checkpoint.recipes import BY_NAME, SCOPE_FIELDS
from scoped_fn._checkpoint.state_value import OWNER_FIELDS
from scoped_fn.state import CompilerState, Fp8State, InputQueue, InputSpec, Owner, QueuedInputs
from tests.checkpoint.values import DTYPES, VALUES, exact, states, tensor_of
from tests.generators.arrays import kept
from tests.state.whole import owners, whole_state

# torch says so once in a process, wherever it first makes such a tensor.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def trip(value: Any, folder: Path, **options: Any) -> Any:
    path = folder / "value.safetensors"
    sf.save(value, path)
    return sf.load(path, **options)


def assert_kept(value: Any, folder: Path) -> Any:
    loaded = trip(value, folder)
    assert exact(loaded) == exact(value)
    return loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values")


def test_a_whole_state(tmp_path: Path) -> None:
    state = whole_state()
    with kept(state):
        loaded = assert_kept(state, tmp_path)
    assert sf.tree_equal(loaded, state)
    assert loaded.owners == state.owners


def test_a_whole_run(tmp_path: Path) -> None:
    params = {"layer.weight": torch.randn(3, 2), "layer.bias": torch.zeros(3)}
    run = {"state": whole_state(), "params": params, "step": 3, "losses": [1.5, 0.25], "best": None}
    assert list(assert_kept(run, tmp_path)) == ["state", "params", "step", "losses", "best"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, folder: Path) -> None:
    made = tensor_of(dtype, (3, 4))
    spread = torch.stack([made, made], -1)[..., 0] if dtype != torch.float4_e2m1fn_x2 else made
    assert_kept([made, made[0, 0], made[:0], made[1:, 1:3], spread, made.T, made.expand(2, 3, 4)], folder)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 2**63 - 1, 2**63, -(2**63), 1 - 2**8192, 1.0, -0.0, 0.1, 5e-324, 1.7e308,
        float("nan"), float("inf"), -float("inf"), complex(-0.0, float("nan")), "",
        "ä\U0001f600\ud800\0", b"", b"\0\xff",
        torch.float32, torch.device("cuda:3"), [], (), {}, OrderedDict(), [()], ({},), ([1], (1,)),
        {"b": 1, "a": 2}, {1: "a", "1": "b", None: 0, 2.5: 1, False: 2}, OrderedDict(b=1, a=2), {"tensor": "a"},
        {"dict": []}, {"__metadata__": torch.ones(1)}, torch.tensor(3), torch.zeros(0, 5), {"": {"": torch.ones(1)}},
    ],
    ids=range(40),
)  # fmt: skip
def test_plain_data(value: Any, folder: Path) -> None:
    assert_kept(value, folder)


@given(VALUES)
def test_random_values(folder: Path, value: Any) -> None:
    assert_kept(value, folder)


@given(states())
def test_random_states(folder: Path, state: sf.CompilerState) -> None:
    assert sf.tree_equal(assert_kept(state, folder), state)


def test_views_of_one_memory_become_tensors_of_their_own(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    left, right, whole = trip((base[:3], base[2:5], base), tmp_path)
    left.zero_()
    assert (right.tolist(), whole.tolist()) == ([2, 3, 4], [0, 1, 2, 3, 4, 5])
    assert right.untyped_storage().nbytes() == 12


def test_conjugate_and_negative_bits(tmp_path: Path) -> None:
    made = torch.tensor([1 + 2j, 3 - 4j])
    conjugate, negative = trip((made.conj(), made.conj().imag), tmp_path)
    assert (conjugate.tolist(), negative.tolist()) == ([1 - 2j, 3 + 4j], [-2, 4])
    assert not conjugate.is_conj()
    assert not negative.is_neg()


def test_the_order_of_dimensions_in_memory_stays(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for made in (images, images.to(torch.complex64), torch.randn(4, 3).T, images[:, :, ::2], torch.ones(1).expand(3)):
        loaded = assert_kept(made, tmp_path)
        dense = torch.empty_like(made)  # torch keeps the order, and closes gaps, in the same way
        assert loaded.stride() == dense.stride()


def test_parameters_come_back_as_tensors(tmp_path: Path) -> None:
    loaded = trip(torch.nn.Parameter(torch.ones(2)), tmp_path)
    assert type(loaded) is torch.Tensor
    assert not loaded.requires_grad


def test_scales_that_owners_share_stay_shared(tmp_path: Path) -> None:
    state = whole_state()
    state = replace(state, fp8=state.fp8.set(1, state.fp8[0]))
    loaded = assert_kept(state, tmp_path)
    assert loaded.fp8[1] is loaded.fp8[0]
    assert sf.describe_fp8(loaded) == sf.describe_fp8(state)


def test_owners_with_equal_scales_do_not_share_them(tmp_path: Path) -> None:
    state = whole_state()
    state = replace(state, fp8=state.fp8.set(1, replace(state.fp8[0], scale=state.fp8[0].scale.clone())))
    loaded = assert_kept(state, tmp_path)
    assert loaded.fp8[1].scale is not loaded.fp8[0].scale


def test_queued_inputs_come_out_as_they_went_in(tmp_path: Path) -> None:
    state, owner = owners("encoder")
    given = ({"b": torch.ones(2), "a": [torch.tensor(3), (None, 1.5, "x")]}, OrderedDict(z=torch.float16))
    state = sf.push_inputs(state, owner, given, {"mask": torch.zeros(2, dtype=torch.bool)}, keep_integers=True)
    loaded, inputs = sf.take_inputs(trip(state, tmp_path), owner)
    assert exact(inputs) == exact((given, {"mask": torch.zeros(2, dtype=torch.bool)}))
    expected, found = (sf.take_inputs(each, owner)[1] for each in (sf.take_inputs(state, owner)[0], loaded))
    assert exact(tuple(sf.materialize(found, 3))) == exact(tuple(sf.materialize(expected, 3)))


def test_a_device_is_where_everything_goes(tmp_path: Path) -> None:
    loaded = trip({"state": whole_state()}, tmp_path, device="cpu")
    assert exact(loaded["state"]) == exact(whole_state())
    with pytest.raises(sf.CheckpointError, match="Expected the device cuda.*, got .*Choose one that is here"):
        trip([torch.ones(1)], tmp_path, device="cuda:77")


def test_names_are_readable_and_other_readers_find_them(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    run = {"state": whole_state(), "params": {"a.b": torch.ones(2, 3).T, "a": {"b": torch.zeros(2)}}}
    sf.save(run, path)
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        assert {"state.key", "state.fp8.0.scale", "state.buffers.0.mean", "params.a.b", "params.a.b#2"} <= names
        assert exact(file.get_tensor("params.a.b")) == exact(run["params"]["a.b"])
        assert exact(file.get_tensor("state.key")) == exact(run["state"].key)


def test_two_saves_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        sf.save({"state": whole_state()}, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    sf.save(sf.load(tmp_path / "one"), tmp_path / "three")
    assert (tmp_path / "three").read_bytes() == (tmp_path / "one").read_bytes()


def test_every_field_is_saved() -> None:
    """A field that is added to one of these has to be saved, or the file loses it without a word."""
    named = {kind.__name__: {field.name for field in fields(kind)} for kind in (CompilerState, Fp8State, InputQueue)}
    named |= {kind.__name__: {field.name for field in fields(kind)} for kind in (InputSpec, QueuedInputs)}
    assert named == {
        "CompilerState": {
            *("owners", "next_token", "buffers", "key", "autocast", "fp8", "overrides", "constants", "inputs")
        },
        "Fp8State": {"columns", "recipe", "scale", "amax_history", "grad_sink"},
        "InputQueue": {"entries", "spec"},
        "InputSpec": {"structure", "specs", "kept", "values"},
        "QueuedInputs": {"structure", "in_frame", "tensors"},
    }
    assert {field.name for field in fields(Owner)} == set(OWNER_FIELDS)
    assert {field.name for field in fields(sf.AutocastScope)} == set(SCOPE_FIELDS)
    kinds = {name for name, kind in vars(sf.recipes).items() if isinstance(kind, type) and name in sf.__all__}
    assert kinds - set(BY_NAME) == {"Format", "MMParams", "QParams", "QuantizerRole", "CustomRecipe"}
