"""The FP8 part of a TransformerEngine checkpoint, in and out."""

from __future__ import annotations

import enum
import io
import pickle
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import scoped_fn as sf
from scoped_fn.interop import te_extra_state
from scoped_fn.interop.te_extra_state import extra_state_tensors
from scoped_fn.interop.transformer_engine import fp8_from_transformer_engine, fp8_to_transformer_engine
from scoped_fn.state.fp8_state import init_fp8
from tests.checkpoint.values import exact
from tests.generators.arrays import kept
from tests.state.whole import owners

COLUMNS = [("fc1", "input"), ("fc1", "weight"), ("fc1", "grad_output"), ("fc2", "grad_output"), ("fc2", "input")]

ONE = {"fc1": "mlp", "fc2": "mlp"}


def held_state(length: int = 3, columns: Any = COLUMNS) -> sf.CompilerState:
    """A state with one owner whose scales are 1, 2, ... and amaxes 10, 11, ... in rows of tens."""
    state, owner = owners("mlp")
    held = init_fp8(columns, sf.DelayedScaling(amax_history_len=length))
    amaxes = 10.0 * torch.arange(1, length + 1)[:, None] + torch.arange(len(columns))
    held = replace(held, scale=torch.arange(len(columns)) + 1.0, amax_history=amaxes)
    return replace(state, fp8=state.fp8.set(owner, held))


def entry(matmuls: int = 1, length: int = 3) -> dict[str, torch.Tensor]:
    """An extra state whose numbers say where they are: forward 100 and more, backward 200 and more."""
    rows = 1000.0 * torch.arange(length)[:, None]
    forward, backward = 100.0 + torch.arange(3 * matmuls), 200.0 + torch.arange(2 * matmuls)
    return {
        "scale_fwd": forward,
        "amax_history_fwd": rows + forward,
        "scale_bwd": backward,
        "amax_history_bwd": rows + backward,
    }


def numbers(extra: dict[str, dict[str, torch.Tensor]]) -> dict[str, Any]:
    return {name: {each: value.tolist() for each, value in held.items()} for name, held in extra.items()}


# Columns and rows, by hand.


def test_columns_in() -> None:
    state = held_state()
    with kept(state):
        loaded = fp8_from_transformer_engine(state, 0, {"fc1._extra_state": entry(), "fc2._extra_state": entry()})
    assert loaded.fp8[0].columns == tuple(COLUMNS)
    assert loaded.fp8[0].scale.tolist() == [100, 101, 200, 200, 100]
    assert loaded.fp8[0].amax_history.tolist() == [
        [100, 101, 200, 200, 100],
        [1100, 1101, 1200, 1200, 1100],
        [2100, 2101, 2200, 2200, 2100],
    ]
    assert exact(replace(loaded, fp8=state.fp8)) == exact(state)


def test_columns_out() -> None:
    state = held_state()
    with kept(state):
        saved = fp8_to_transformer_engine(state, 0)
    assert numbers(saved) == {
        "fc1._extra_state": {
            "scale_fwd": [1, 2, 1],  # the output, which nothing is quantized for, stays at 1
            "amax_history_fwd": [[10, 11, 0], [20, 21, 0], [30, 31, 0]],
            "scale_bwd": [3, 1],
            "amax_history_bwd": [[12, 0], [22, 0], [32, 0]],
        },
        "fc2._extra_state": {
            "scale_fwd": [5, 1, 1],
            "amax_history_fwd": [[14, 0, 0], [24, 0, 0], [34, 0, 0]],
            "scale_bwd": [4, 1],
            "amax_history_bwd": [[13, 0], [23, 0], [33, 0]],
        },
    }


def test_several_matmuls_of_one_module() -> None:
    state, names = held_state(), {"fc1": ("mlp", 0), "fc2": ("mlp", 1)}
    saved = fp8_to_transformer_engine(state, 0, names=names)
    assert numbers(saved) == {
        "mlp._extra_state": {
            "scale_fwd": [1, 2, 1, 5, 1, 1],
            "amax_history_fwd": [[10, 11, 0, 14, 0, 0], [20, 21, 0, 24, 0, 0], [30, 31, 0, 34, 0, 0]],
            "scale_bwd": [3, 1, 4, 1],
            "amax_history_bwd": [[12, 0, 13, 0], [22, 0, 23, 0], [32, 0, 33, 0]],
        }
    }
    loaded = fp8_from_transformer_engine(state, 0, {"mlp._extra_state": entry(2)}, names=names)
    assert loaded.fp8[0].scale.tolist() == [100, 101, 200, 202, 103]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_there_and_back(length: int) -> None:
    state = held_state(length)
    blank = sf.state.tree_map(torch.zeros_like, state)
    for names in (None, {"fc1": "a", "fc2": ("b", 1)}):
        saved = fp8_to_transformer_engine(state, 0, names=names)
        again = fp8_from_transformer_engine(blank, 0, saved, names=names)
        assert exact(again.fp8[0].scale) == exact(state.fp8[0].scale)
        assert exact(again.fp8[0].amax_history) == exact(state.fp8[0].amax_history)
        assert exact(fp8_to_transformer_engine(again, 0, names=names)) == exact(saved)


@pytest.mark.parametrize(
    ("theirs", "ours", "column"),
    [
        (4, 3, [0, 2000, 3000]),  # the oldest goes
        (4, 2, [0, 3000]),
        (4, 1, [0]),
        (2, 4, [0, 0, 0, 1000]),  # zeros for what is not known
        (1, 3, [0, 0, 0]),
    ],
)
def test_histories_of_another_length(theirs: int, ours: int, column: list[float]) -> None:
    state = held_state(ours, [("fc1", "input")])
    loaded = fp8_from_transformer_engine(state, 0, {"fc1._extra_state": entry(1, theirs)})
    found = loaded.fp8[0].amax_history[:, 0]
    assert found.tolist() == [number + 100 if number or row == 0 else 0 for row, number in enumerate(column)]


def test_owners_that_share_scales_go_on_sharing_them() -> None:
    state = held_state()
    state, second = sf.acquire(state, "eval")
    state = replace(state, fp8=state.fp8.set(second, state.fp8[0]))
    saved = {"fc1._extra_state": entry(), "fc2._extra_state": entry()}
    loaded = fp8_from_transformer_engine(state, None, saved)
    assert loaded.fp8[second] is loaded.fp8[0]


# The pickled form.


@dataclass
class Recipe:
    """Stands for a recipe of TransformerEngine: making one is noticed."""

    margin: int = 0

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a class of the checkpoint was used")


class Format(enum.Enum):
    HYBRID = (448.0, 57344.0)


@pytest.fixture
def pickled() -> Iterator[Any]:
    """Pickles as TransformerEngine does, its classes gone again when they are read."""
    name = "transformer_engine.common.recipe"
    parts = {part: types.ModuleType(part) for part in ("transformer_engine", "transformer_engine.common", name)}

    def make(content: dict[str, Any]) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            for part, module in parts.items():
                patch.setitem(sys.modules, part, module)
            for kind in (Recipe, Format):
                patch.setattr(kind, "__module__", name)
                patch.setattr(parts[name], kind.__name__, kind, raising=False)
            return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)

    yield make
    assert not any(part in sys.modules for part in parts)


def test_bytes_as_transformer_engine_makes_them(pickled: Any) -> None:
    extra = {"num_gemms": 1, "fp8_max_fwd": 448.0, "name": ("a", [True])}
    made = pickled({"recipe": Recipe(2), "format": Format.HYBRID, **entry(), "extra_fp8_variables": extra})
    assert b"transformer_engine" in bytes(made.tolist())
    assert exact(extra_state_tensors(made, "fc1")) == exact(entry())
    saved = {"fc1._extra_state": made, "fc2._extra_state": io.BytesIO(bytes(made.tolist())), "fc1.weight": 3}
    assert fp8_from_transformer_engine(held_state(), 0, saved).fp8[0].scale.tolist() == [100, 101, 200, 200, 100]


def test_bytes_as_older_versions_made_them() -> None:
    saved = io.BytesIO()
    torch.save({**entry(), "scale_inv_fwd": torch.ones(3), "extra_fp8_variables": {"num_gemms": 1}}, saved)
    assert exact(extra_state_tensors(saved, "fc1")) == exact(entry())
    as_bytes = torch.frombuffer(bytearray(saved.getvalue()), dtype=torch.uint8)
    assert exact(extra_state_tensors(as_bytes, "fc1")) == exact(entry())


def test_views_in_a_pickle() -> None:
    table = torch.arange(12.0).reshape(4, 3)
    turned = entry()["amax_history_bwd"].T.contiguous().T
    made = {**entry(), "scale_fwd": table[1], "amax_history_fwd": table[1:], "amax_history_bwd": turned}
    content = torch.frombuffer(bytearray(pickle.dumps(made)), dtype=torch.uint8)
    assert exact(extra_state_tensors(content, "fc1")) == exact(made)


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.folder,)


class Storage:
    """Unpickling it asks torch to load bytes with a payload in them."""

    def __init__(self, inner: bytes) -> None:
        self.inner = inner

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self.inner,)


def test_nothing_in_a_pickle_is_executed(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    saved = io.BytesIO()
    torch.save({**entry(), "more": Payload(folder)}, saved)
    forged = [
        pickle.dumps({**entry(), "more": Payload(folder)}),
        pickle.dumps({**entry(), "more": Storage(pickle.dumps(Payload(folder)))}),
        pickle.dumps({**entry(), "more": Storage(saved.getvalue())}),
        saved.getvalue(),
        b"cos\nsystem\n(S'touch " + str(folder).encode() + b"'\ntR.",
        b"ctransformer_engine.os\nsystem\n(S'touch " + str(folder).encode() + b"'\ntR.",
        pickle.dumps({"a": eval}),
        pickle.dumps(entry())[:-9],
        b"",
        b"hello",
    ]
    for content in forged:
        for value in (torch.tensor(list(content), dtype=torch.uint8), io.BytesIO(content)):
            with pytest.raises(sf.CheckpointError, match=r"^Expected .*fc1"):
                extra_state_tensors(value, "fc1")
            assert not folder.exists()
    pickle.loads(forged[0])
    assert folder.exists()  # the payload works


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        *[(0, (7,), (1,)), (5, (2,), (1,)), (0, (2, 2), (5, 1)), (0, (3,), (-1,)), (-1, (1,), (1,))],
        *[
            (0, (7,), (0,)),
            (0, (2,), (1, 1)),
            (2**61, (1,), (1,)),
            (0, (2**61, 2**61), (0, 0)),
            (0, ("a",), (1,)),
            (0, 3, 1),
        ],
    ],
)
def test_a_tensor_beyond_its_memory(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    class Forged:
        def __reduce__(self) -> tuple[Any, ...]:
            rebuild, (storage, *_) = torch.arange(6.0).__reduce_ex__(2)
            return rebuild, (storage, offset, size, stride, False, {})

    content = pickle.dumps({**entry(), "scale_fwd": Forged()})
    with pytest.raises(sf.CheckpointError, match="Expected a pickle of tensors and plain data in fc1"):
        extra_state_tensors(io.BytesIO(content), "fc1")


def test_a_pickle_changes_no_function() -> None:
    for name in (b"torch._utils\n_rebuild_tensor_v2", b"torch.storage\n_load_from_bytes", b"transformer_engine\nA"):
        for state in (b"}S'mark'\nI1\ns", b"N}S'mark'\nI1\ns\x86"):
            with pytest.raises(sf.CheckpointError):
                extra_state_tensors(io.BytesIO(b"c" + name + b"\n" + state + b"b."), "fc1")
    for found in (te_extra_state._tensor_of, te_extra_state._storage_of, te_extra_state.Inert):
        assert not hasattr(found, "mark")


# What is refused.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale_fwd": None}, "Expected fc1._extra_state with scale_fwd, .* got none of scale_fwd"),
        ({"scale_fwd": [1.0, 1.0, 1.0]}, "scale_fwd in fc1._extra_state as float32 of 1 dimensions, got a list"),
        ({"scale_fwd": torch.ones(3).double()}, r"as float32 of 1 dimensions, got float64\[3\]"),
        ({"scale_bwd": torch.ones(2, 1)}, r"as float32 of 1 dimensions, got float32\[2, 1\]"),
        ({"scale_bwd": torch.ones(3)}, "three columns of the forward and two of the backward"),
        ({"scale_fwd": torch.ones(4)}, "three columns of the forward and two of the backward"),
        ({"amax_history_bwd": torch.ones(4, 2)}, "three columns of the forward and two of the backward"),
        ({"amax_history_fwd": torch.ones(3, 2)}, "three columns of the forward and two of the backward"),
    ],
)
def test_an_entry_of_another_form(change: dict[str, Any], words: str) -> None:
    made = {name: value for name, value in {**entry(), **change}.items() if value is not None}
    with pytest.raises(sf.CheckpointError, match=words):
        fp8_from_transformer_engine(held_state(), 0, {"fc1._extra_state": made, "fc2._extra_state": entry()})


@pytest.mark.parametrize(
    ("state_dict", "names", "words"),
    [
        ({}, None, "Expected '.*._extra_state' in the state_dict, got no extra state at all"),
        ({"fc1._extra_state": entry()}, None, "Expected 'fc2._extra_state' in the state_dict, got fc1"),
        ({"mlp._extra_state": entry(1)}, {"fc1": "mlp", "fc2": ("mlp", 1)}, "Expected matmul 1 of 'mlp', got 1"),
        ({"mlp._extra_state": torch.empty(0, dtype=torch.uint8)}, ONE, "an empty extra state"),
        ({"mlp._extra_state": torch.empty(3)}, ONE, "as a dict of tensors or as bytes"),
        ({"mlp._extra_state": None}, ONE, "got a NoneType"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_model(state_dict: dict[str, Any], names: Any, words: str) -> None:
    with pytest.raises(sf.CheckpointError, match=words):
        fp8_from_transformer_engine(held_state(), 0, state_dict, names=names)


def test_owners_without_scales() -> None:
    state, owner = owners("mlp")
    for call in (fp8_to_transformer_engine, lambda *given: fp8_from_transformer_engine(*given, {})):
        with pytest.raises(ValueError, match="Expected an owner with FP8 scales"):
            call(state, owner)
        with pytest.raises(sf.OwnershipError):
            call(state, 7)


def test_two_sites_in_one_place() -> None:
    with pytest.raises(ValueError, match="Expected a place of its own for each site"):
        fp8_to_transformer_engine(held_state(), 0, names={"fc1": "mlp", "fc2": "mlp"})


def test_the_next_step_uses_what_was_loaded() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    x = torch.randn(16, 16)
    state = sf.autocast(sf.init_state(), sf.DelayedScaling(amax_history_len=4))
    state, fn = sf.compile(state, Loss(), (x,), backend="eager")
    step, after = sf.value_and_grad(fn), state
    for _ in range(3):
        after, _ = step(after, fn.params, x)
    saved = fp8_to_transformer_engine(after, fn)
    assert list(saved) == ["inner.0._extra_state", "inner.1._extra_state"]
    loaded = fp8_from_transformer_engine(state, fn, saved)
    assert exact(loaded) == exact(after)
    assert exact(step(loaded, fn.params, x)[1][0]) == exact(step(after, fn.params, x)[1][0])
    assert exact(step(state, fn.params, x)[1][0]) != exact(step(after, fn.params, x)[1][0])


def test_a_pickle_that_asks_for_memory_is_refused() -> None:
    content = b"\x80\x04Nr" + (0x0FFFFFFF).to_bytes(4, "little") + b"."
    given = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    with pytest.raises(
        sf.CheckpointError, match=r"Expected a pickle of tensors and plain data .*, got 'place 268435455"
    ):
        extra_state_tensors(given, "0._extra_state")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"typo": "other"}, r"Expected names of the sites .*fc1.*, got one of 'typo'"),
        ({"fc1": ("m", -1)}, r"Expected the index of a matmul of 'm', from 0, got -1"),
        ({"fc1": ("m", 1.5)}, r"Expected the index of a matmul of 'm', from 0, got 1.5"),
    ],
)
def test_names_that_cannot_be(names: Any, words: str) -> None:
    state = held_state()
    with pytest.raises(ValueError, match=words):
        fp8_to_transformer_engine(state, 0, names=names)
    with pytest.raises(ValueError, match=words):
        fp8_from_transformer_engine(state, 0, {"m._extra_state": entry(2)}, names=names)


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale_fwd", v) for v in (0.0, -1.0, float("nan"), float("inf"))] + [("amax_history_fwd", -1.0)],
)
def test_numbers_that_no_scale_can_be(name: str, value: float) -> None:
    damaged = entry()
    damaged[name] = torch.full_like(damaged[name], value)
    state = held_state()
    with pytest.raises(sf.CheckpointError, match="Expected scales above 0 and amaxes of 0 or more, got others"):
        fp8_from_transformer_engine(state, 0, {"fc1._extra_state": damaged, "fc2._extra_state": damaged})
