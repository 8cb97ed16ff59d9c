"""Files with the right digest and the wrong contents: each is one clear error, and no state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import scoped_fn as sf
from tests.checkpoint.files import document_of, forge, forge_value
from tests.checkpoint.test_damaged import refusal
from tests.checkpoint.values import exact, states
from tests.generators.operations import AUTOTUNE
from tests.state.whole import whole_state

# torch says so once in a process, wherever it first makes such a tensor.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
Place = tuple[Any, ...]
OWNER = ("state", "owners", 0, 1)
FP8 = ("state", "fp8", 0, 1)
SCOPE = ("state", "autocast", 0)
SPEC = ("state", "inputs", 0, 1, "spec")
ENTRY = ("state", "inputs", 0, 1, "entries", 0)
RECIPE = (*SCOPE, "recipe", "DelayedScaling")
ONE = {"tensor": "fp8.0.scale"}


def refused_with(tmp_path: Path, place: Place, new: Any) -> str:
    return refusal(forge_value(tmp_path / "file", whole_state(), (place, new)))


def test_a_forged_file_without_changes_loads(tmp_path: Path) -> None:
    assert exact(sf.load(forge_value(tmp_path / "file", whole_state()))) == exact(whole_state())


@pytest.mark.parametrize(
    ("place", "new", "words"),
    [
        (("state", "owners"), None, "a state with autocast, buffers"),
        (("state", "more"), 1, "a state with autocast, buffers"),
        (("state",), [1], "a state with autocast, buffers"),
        (("state", "next_token"), 1, "the token of an owner"),
        (("state", "next_token"), -1, "a next token, got -1"),
        (("state", "next_token"), True, "a next token, got True"),
        (("state", "next_token"), 2.0, "a next token, got 2.0"),
        (("state", "owners"), {"0": 1}, "pairs of owners"),
        (("state", "owners", 0), [0], "pairs of owners"),
        (("state", "owners", 0, 0), 1, "each once"),
        (("state", "owners", 0, 0), 2, "the token of an owner"),
        (("state", "owners", 0, 0), -1, "the token of an owner"),
        (("state", "owners", 0, 0), "0", "the token of an owner"),
        (("state", "owners", 0, 0), [0], "each once"),
        ((*OWNER, "name"), 3, "an owner's name, got 3"),
        ((*OWNER, "name"), None, "an owner with name"),
        ((*OWNER, "more"), 3, "an owner with name"),
        ((*OWNER, "generation"), -1, "an owner's generation"),
        ((*OWNER, "frames"), [0], "an owner's frames"),
        ((*OWNER, "frames"), {"tuple": [1]}, "open frames below 1"),
        ((*OWNER, "frames"), {"tuple": [0, 0]}, "open frames below 1"),
        ((*OWNER, "entry"), "first", "an owner's entry"),
        ((*OWNER, "settled"), 1, "an owner's settled"),
        (("state", "buffers", 0, 0), 5, "the token of an owner"),
        (("state", "buffers", 0, 1, 0, 0), 5, "a name, got 5"),
        (("state", "buffers", 0, 1, 0, 0), "count", "buffers, each once"),
        (("state", "buffers", 0, 1, 0, 1), 5, "a tensor, got 5"),
        (("state", "buffers", 0, 1, 0, 1), {"tensor": "key"}, "a tensor that is used once"),
        (("state", "buffers", 0, 1, 0, 1), {"tensor": "none"}, "a tensor that is used once"),
        (("state", "buffers", 0, 1, 0, 1), {"tensor": ["key"]}, "a tensor that is used once"),
        (("state", "buffers", 0, 1, 0, 1, "dtype"), "float16", "a tensor that is stored for float16"),
        (("state", "buffers", 0, 1, 0, 1, "dtype"), "complex64", "a tensor that is stored for complex64"),
        (("state", "buffers", 0, 1, 0, 1, "dtype"), "Tensor", "the name of a dtype"),
        (("state", "buffers", 0, 1, 0, 1, "dtype"), 3, "the name of a dtype"),
        (("state", "buffers", 0, 1, 0, 1, "device"), "meta", "a device with memory"),
        (("state", "buffers", 0, 1, 0, 1, "device"), "moon", "the name of a device"),
        (("state", "buffers", 0, 1, 0, 1, "device"), 3, "the name of a device"),
        (("state", "buffers", 0, 1, 0, 1, "stride"), [2], "strides without gaps"),
        (("state", "buffers", 0, 1, 0, 1, "stride"), [0], "strides without gaps"),
        (("state", "buffers", 0, 1, 0, 1, "stride"), [-1], "strides without gaps"),
        (("state", "buffers", 0, 1, 0, 1, "stride"), [1, 1], "strides of 1 dimensions"),
        (("state", "buffers", 0, 1, 0, 1, "stride"), "1", "strides of 1 dimensions"),
        (("state", "buffers", 0, 1, 0, 1, "more"), "1", "a tensor, got"),
        (("state", "buffers", 0, 1), [], "each tensor in one place, got ['buffers.0.count', 'buffers.0.mean']"),
        (("state", "key"), ONE, "a random key"),
        (("state", "key"), [1, 2], "a tensor, got [1, 2]"),
        (("state", "fp8", 0, 0), 7, "the token of an owner"),
        ((*FP8, "columns"), [["0", "input"]], "scale of FP8 as float32[1], got float32[2]"),
        ((*FP8, "columns"), [["0", "input"], ["0", "input"]], "different columns"),
        ((*FP8, "columns"), [["0", "input"], ["0", "output"]], "columns of a site and a role"),
        ((*FP8, "columns"), [["0", "input"], [0, "input"]], "columns of a site and a role"),
        ((*FP8, "columns"), [["0", "input"], "ab"], "columns of a site and a role"),
        ((*FP8, "columns"), [["0", "input"], ["0", "weight"]], "grad_sink of FP8 as float32[0]"),
        ((*FP8, "columns"), None, "scales with amax_history"),
        ((*FP8, "recipe", "DelayedScaling", 2, 1), 5, "amax_history of FP8 as float32[5, 2]"),
        ((*FP8, "recipe"), {"MXFP8BlockScaling": []}, "the fields of MXFP8BlockScaling"),
        ((*FP8, "scale"), {"tensor": "fp8.0.grad_sink"}, "a tensor that is used once"),
        ((*FP8, "scale"), {"tensor": "key"}, "a tensor that is used once"),
        (FP8, {"same_as": 1}, "an owner before, with scales"),
        (FP8, {"same_as": 0}, "an owner before, with scales"),
        (("state", "autocast"), 3, "a list of scopes"),
        ((*SCOPE, "enabled"), 1, "a scope's enabled"),
        ((*SCOPE, "recipe"), 1, "the name of a recipe"),
        ((*SCOPE, "skip"), {"tuple": [1]}, "a scope's skip"),
        ((*SCOPE, "skip"), ["a"], "a scope's skip"),
        ((*SCOPE, "group"), 1, "a scope's group"),
        ((*SCOPE, "sites"), "some", "a scope's sites"),
        ((*SCOPE, "sites"), ["all"], "a scope's sites"),
        ((*SCOPE, "more"), 1, "a scope with recipe"),
        ((*SCOPE, "recipe"), {"CustomRecipe": []}, "the name of a recipe"),
        ((*SCOPE, "recipe"), {"eval": []}, "the name of a recipe"),
        ((*SCOPE, "recipe"), {"DelayedScaling": []}, "the fields of DelayedScaling"),
        ((*RECIPE, 0), ["more", 1], "the fields of DelayedScaling"),
        ((*RECIPE, 0, 1), 1000, "fields that DelayedScaling takes"),
        ((*RECIPE, 0, 1), True, "a value of DelayedScaling.margin, got True"),
        ((*RECIPE, 1, 1), {"Format": "E9"}, "the name of a format"),
        ((*RECIPE, 1, 1), {"Format": ["E4M3"]}, "the name of a format"),
        ((*RECIPE, 1, 1), {"Format": "E2M1"}, "fields that DelayedScaling takes"),
        ((*RECIPE, 1, 1), "HYBRID", "a value of DelayedScaling.fp8_format"),
        ((*RECIPE, 1, 1), {"MMParams": [True]}, "a value of DelayedScaling.fp8_format"),
        ((*RECIPE, 1, 1), {"MMParams": [1]}, "a value of MMParams.use_split_accumulator"),
        ((*RECIPE, 1, 1), {"MMParams": [True, True]}, "the 1 fields of MMParams"),
        ((*RECIPE, 2, 1), 0, "fields that DelayedScaling takes"),
        ((*RECIPE, 3, 1), "least", "fields that DelayedScaling takes"),
        ((*RECIPE, 4, 1), "os.system", "a value of DelayedScaling.scaling_factor_compute_algo"),
        (("state", "overrides", 0, 0), "os.environ", "a setting of torch's compiler"),
        (("state", "overrides", 0, 0), 1, "a setting of torch's compiler"),
        (("state", "overrides", 1, 0), AUTOTUNE, "settings, each once"),
        (("state", "overrides", 0, 1), [], "an owner for each setting"),
        (("state", "overrides", 0, 1, 0, 0), 9, "the token of an owner"),
        (("state", "overrides", 0, 1, 0, 1), [1], "a hashable value"),
        (("state", "overrides", 0, 1, 0, 1), {"object": 1}, "a kind of value that this version knows"),
        (("state", "constants", 0, 0), 1, "a constant of plain data"),
        (("state", "constants", 0, 1), [1], "a constant of plain data"),
        (("state", "constants", 0, 1), {"tensor": "key"}, "a kind of value that this version knows, got 'tensor'"),
        (("state", "inputs", 0, 0), 3, "the token of an owner"),
        ((*ENTRY, "tensors"), [], "2 tensors of a call, got 0"),
        ((*ENTRY, "in_frame"), 1, "whether a frame was open"),
        ((*ENTRY, "structure"), 1, "a structure with"),
        ((*ENTRY, "structure", "leaves"), [None], "containers of the numbers below 1"),
        ((*ENTRY, "structure", "leaves", 1), {"static": {"tensor": "key"}}, "a kind of value"),
        ((*ENTRY, "structure", "leaves", 1), False, "a leaf that is no tensor"),
        ((*ENTRY, "structure", "leaves", 1), {"function": 3}, "a leaf that is no tensor"),
        ((*ENTRY, "structure", "containers"), {"tuple": [1, 0, 2]}, "containers of the numbers below 3, in order"),
        ((*ENTRY, "structure", "containers"), {"tuple": [0, 1, 2.0]}, "containers of the numbers below 3, in order"),
        ((*ENTRY, "structure", "containers"), {"deque": [0, 1, 2]}, "a kind of value"),
        ((*ENTRY, "structure", "scope"), 1, "a scope with recipe"),
        ((*SPEC, "specs"), [], "1 specs, got 0"),
        ((*SPEC, "specs", 0, "shape"), [-1], "whole numbers"),
        ((*SPEC, "specs", 0, "shape"), [2**63], "whole numbers"),
        ((*SPEC, "specs", 0, "shape"), [3], "a kept tensor as int64[3]"),
        ((*SPEC, "specs", 0, "stride"), [], "strides for [2]"),
        ((*SPEC, "specs", 0, "dtype"), 3, "a dtype and a device"),
        ((*SPEC, "specs", 0, "device"), {"dtype": "int64"}, "a dtype and a device"),
        ((*SPEC, "specs", 0, "requires_grad"), 0, "whether a gradient is wanted"),
        ((*SPEC, "kept"), [1], "the places of 1 tensors"),
        ((*SPEC, "kept"), [], "the places of 1 tensors"),
        ((*SPEC, "values"), [], "the places of 0 tensors"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_a_state_that_cannot_be(place: Place, new: Any, words: str, tmp_path: Path) -> None:
    assert words in refused_with(tmp_path, place, new)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("key", torch.zeros(2, dtype=torch.int64), "a random key"),
        ("key", torch.zeros(3, dtype=torch.uint32), "a random key"),
        ("fp8.0.scale", torch.ones(2, dtype=torch.float64), "scale of FP8 as float32[2], got float64[2]"),
        ("fp8.0.scale", torch.ones(2, 1), "scale of FP8 as float32[2], got float32[2, 1]"),
        ("fp8.0.amax_history", torch.ones(3, 2), "amax_history of FP8 as float32[4, 2], got float32[3, 2]"),
        ("fp8.0.grad_sink", torch.ones(2), "grad_sink of FP8 as float32[1], got float32[2]"),
        ("inputs.0.spec.0", torch.ones(2), "a kept tensor as int64[2], got float32[2]"),
        ("more", torch.ones(2), "each tensor in one place, got ['more']"),
    ],
)
def test_tensors_that_cannot_be(name: str, tensor: torch.Tensor, words: str, tmp_path: Path) -> None:
    assert words in refusal(forge_value(tmp_path / "file", whole_state(), **{name: tensor}))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"a": 1, "b": 2}, "one kind of value"),
        ({}, "one kind of value"),
        ({"function": "os.system"}, "a kind of value that this version knows, got 'function'"),
        ({"list": 3}, "the parts of a list"),
        ({"tuple": {"a": 1}}, "the parts of a tuple"),
        ({"dict": [[1]]}, "pairs of a dict"),
        ({"dict": {"a": 1}}, "pairs of a dict"),
        ({"dict": [["a", 1], ["a", 2]]}, "different keys of a dict"),
        ({"dict": [[1, 1], [True, 2]]}, "different keys of a dict"),
        ({"ordered_dict": [["a", 1], ["a", 2]]}, "different keys of a ordered_dict"),
        ({"dict": [[[1], 2]]}, "a key without parts"),
        ({"dict": [[{"tuple": []}, 2]]}, "a key without parts"),
        ({"dict": [[{"state": {}}, 2]]}, "a kind of value that this version knows, got 'state'"),
        (2**8192, "an integer of at most 8192 bits, got one of 8193"),
        ({"dict": [[2**8192, 1]]}, "an integer of at most 8192 bits, got one of 8193"),
        ({"float": "1.0"}, "nan, inf or -inf"),
        ({"float": 1.0}, "nan, inf or -inf"),
        ({"float": ["nan"]}, "nan, inf or -inf"),
        ({"complex": [1.0]}, "two floats"),
        ({"complex": [1, 2]}, "two floats"),
        ({"complex": 1}, "two floats"),
        ({"bytes": "?"}, "bytes in base64"),
        ({"bytes": "\u00e4"}, "bytes in base64"),
        ({"bytes": 3}, "bytes in base64"),
        ({"dtype": "os"}, "the name of a dtype"),
        ({"device": "here"}, "the name of a device"),
        ({"device": "cuda:300"}, "the name of a device"),
        ({"": {"a": 1}}, "a kind of value"),
        ({"dict": [[{"": [1]}, 2]]}, "a kind of value"),
        ({"tensor": "a"}, "a tensor that is used once"),
    ],
)
def test_values_that_cannot_be(document: Any, words: str, tmp_path: Path) -> None:
    assert words in refusal(forge(tmp_path / "file", document, {}))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(-9, 9), st.sampled_from(["key", "a"])),
    lambda parts: st.one_of(st.lists(parts, max_size=2), st.dictionaries(st.sampled_from(["tuple", "a"]), parts)),
    max_leaves=4,
)


@given(state=states(), data=st.data())
def test_any_change_of_a_document_is_an_error_or_another_whole_value(
    tmp_path_factory: pytest.TempPathFactory, state: sf.CompilerState, data: st.DataObject
) -> None:
    document = document_of(state)
    places = list(places_of(document))
    place = data.draw(st.sampled_from(places))
    path = tmp_path_factory.getbasetemp() / "any"
    forge_value(path, state, (place, data.draw(JSON)))
    try:
        loaded = sf.load(path)
    except sf.CheckpointError:
        return
    sf.save(loaded, path)  # what loads is whole: it can be saved, and is the same again
    assert exact(sf.load(path)) == exact(loaded)


def places_of(document: Any, place: Place = ()) -> Any:
    """Where each part of JSON is."""
    parts = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, part in parts:
        yield (*place, key)
        yield from places_of(part, (*place, key))


def test_every_refusal_of_a_place_names_no_more_than_it_shows(tmp_path: Path) -> None:
    """A file cannot fill the screen, or the memory, with its own words."""
    text = refused_with(tmp_path, (*OWNER, "name"), ["x" * 10_000] * 100)
    assert len(text) < 600
    assert json.dumps("x" * 100) not in text


@pytest.mark.parametrize("byte", [2, 255])
def test_booleans_of_other_bytes(byte: int, tmp_path: Path) -> None:
    strange = torch.tensor([0, 1, byte], dtype=torch.uint8).view(torch.bool)
    words = refusal(forge(tmp_path / "file", {"tensor": "x"}, {"x": strange}))
    assert "booleans of the bytes 0 and 1 in x, got others in" in words
    with pytest.raises(sf.CheckpointError, match="booleans of the bytes 0 and 1 in value"):
        sf.save(strange, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_description_of_too_many_parts_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    assert "of at most 4000000 parts" in refusal(forge(tmp_path / "file", [[]] * 4_000_001, {}))
