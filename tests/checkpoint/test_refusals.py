"""What cannot be saved is said before anything is written, with the place where it is."""

from __future__ import annotations

import re
from collections import defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import scoped_fn as sf
from scoped_fn.kernels import Quantizer
from scoped_fn.state.fp8_state import init_fp8
from tests.state.whole import owners, whole_state

Pair = namedtuple("Pair", "left right")


@dataclass
class Data:
    x: torch.Tensor


class Text(str):
    __slots__ = ()


def refused(value: Any, folder: Path, words: str) -> None:
    with pytest.raises(sf.CheckpointError) as error:
        sf.save(value, folder / "run")
    text = str(error.value)
    assert re.fullmatch(r"Expected .+, got .+\. [A-Z].+\.", text, re.DOTALL), text
    assert words in text
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (print, "got a builtins.builtin_function_or_method at the top."),
        (2**8192, "an integer of at most 8192 bits, got one of 8193"),
        ({"a": {-(10**5000): 1}}, "an integer of at most 8192 bits, got one of 16610"),
        ({"a": [1, object()]}, "a builtins.object at a.1"),
        ({"a": {1, 2}}, "a builtins.set at a"),
        ({"a": {(1, 2): 3}}, "a builtins.tuple at a"),
        ({"a": {torch.ones(1): 3}}, "a torch.Tensor at a"),
        (Pair(1, 2), "test_refusals.Pair"),
        (Data(torch.ones(1)), "test_refusals.Data"),
        (Text("a"), "test_refusals.Text"),
        (defaultdict(list), "a collections.defaultdict"),
        (sf.Format.E4M3, "a scoped_fn.recipes.Format"),
        (sf.DelayedScaling(), "a scoped_fn.recipes.DelayedScaling"),
        (torch.Size([1]), "a torch.Size"),
        (whole_state().buffers, "a scoped_fn.state.frozen_dict.FrozenDict"),
        (torch.ones(2, device="meta"), "one on the meta device"),
        (torch.ones(2).to_sparse(), "one of torch.float32 and torch.sparse_coo"),
        (torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "Mine"),
        (torch.ones(2, dtype=torch.uint8).view(torch.uint4), "a dtype that can be saved at value, got uint4."),
    ],
    ids=range(19),
)  # fmt: skip
def test_a_value_that_a_file_cannot_hold(value: Any, words: str, tmp_path: Path) -> None:
    refused(value, tmp_path, words)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning")
def test_tensors_of_other_kinds(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(1)])
    for made in (nested, torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)):
        refused(made, tmp_path, "a tensor with its own values in memory at value")


@pytest.mark.parametrize("left", [0, 12])
def test_memory_that_was_freed_or_cut(left: int, tmp_path: Path) -> None:
    made = torch.ones(4)
    view = made[1:3]
    made.untyped_storage().resize_(left)
    refused([made], tmp_path, "one whose memory was freed")
    if left:
        sf.save(view, tmp_path / "run")
        assert torch.equal(sf.load(tmp_path / "run"), view)
    else:
        refused([view], tmp_path, "one whose memory was freed")
    sf.save(made[:0], tmp_path / "run")
    (tmp_path / "run").unlink()
    refused([torch._efficientzerotensor(3)], tmp_path, "one whose memory was freed")


def test_what_contains_itself(tmp_path: Path) -> None:
    value: list[Any] = []
    value.append(value)
    refused(value, tmp_path, "containers in at most 64 others")


@pytest.mark.parametrize("depth", [64, 65])
def test_the_depth_that_a_file_can_have(depth: int, tmp_path: Path) -> None:
    for kind in (lambda part: [part], lambda part: (part,), lambda part: {"a": part}):
        value: Any = torch.ones(1)
        for _ in range(depth):
            value = kind(value)
        if depth > 64:
            refused(value, tmp_path, "containers in at most 64 others")
        else:
            sf.save(value, tmp_path / "deep")
            sf.load(tmp_path / "deep")
            (tmp_path / "deep").unlink()


def test_a_traced_tensor(tmp_path: Path) -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        refused(x, tmp_path, "a plain tensor at value")
        return x.sum()

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        refused([x], tmp_path, "one inside a torch.func transform")
        return x.sum()

    torch.func.grad(wrapped)(torch.ones(2))
    torch.func.vmap(wrapped)(torch.ones(2, 2))
    with torch._subclasses.FakeTensorMode() as mode:
        inside(mode.from_tensor(torch.ones(2)))


INSIDE: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "grad": lambda body: torch.func.grad(body)(torch.ones(2)),
    "vmap": lambda body: torch.func.vmap(body)(torch.ones(2, 2)),
    "jvp": lambda body: torch.func.jvp(body, (torch.ones(2),), (torch.ones(2),)),
    "functionalize": lambda body: torch.func.functionalize(body)(torch.ones(2)),
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside_a_transform_plain_tensors_are_saved_and_wrapped_ones_refused(name: str, tmp_path: Path) -> None:
    value = {"plain": torch.arange(3.0), "column": torch.ones(4)[::2], "state": sf.init_state(key=7)}

    def body(x: torch.Tensor) -> torch.Tensor:
        refused(x, tmp_path, "one inside a torch.func transform")
        sf.save(value, tmp_path / "run")
        loaded.append(sf.load(tmp_path / "run"))
        return x.sum()

    loaded: list[Any] = []

    INSIDE[name](body)
    assert sf.tree_equal(loaded[0], value)
    with torch._subclasses.FakeTensorMode(), torch.device("meta"):
        sf.save(sf.load(tmp_path / "run"), tmp_path / "again")
    assert torch.equal(sf.load(tmp_path / "again")["plain"], torch.arange(3.0))


def test_the_path_and_the_value_swapped(tmp_path: Path) -> None:
    for call in (lambda: sf.save("run", {"a": 1}), lambda: sf.save(1, 3), lambda: sf.load(3)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"Expected a path, got a (dict|int). Write sf.save\(value, path\)"):
            call()


RECIPES = [
    sf.CustomRecipe(qfactory=lambda role: Quantizer("current")),
    sf.DelayedScaling(amax_compute_algo=lambda history: history.amax(0)),
    sf.DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, largest, recipe: scale),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=["custom", "amax", "scale"])
def test_a_recipe_that_holds_a_function(recipe: Any, tmp_path: Path) -> None:
    state = sf.autocast(sf.init_state(), recipe)
    refused({"state": state}, tmp_path, "End the scope first (sf.end_autocast)")
    sf.save(sf.end_autocast(state), tmp_path / "run")


def test_scales_that_are_updated_by_a_function(tmp_path: Path) -> None:
    state, owner = owners("encoder")
    held = init_fp8([("0", "input")], RECIPES[1])
    refused(replace(state, fp8=state.fp8.set(owner, held)), tmp_path, "a recipe without functions of your own")


@pytest.mark.parametrize(
    "given", [(Data(torch.ones(1)),), (Pair(torch.ones(1), 2),), (torch.Size([2]),), (slice(1, 2),), (Data,)]
)
def test_queued_inputs_of_other_containers(given: tuple[Any, ...], tmp_path: Path) -> None:
    state, owner = owners("encoder")
    state = sf.push_inputs(state, owner, given)
    refused(state, tmp_path, "at inputs.0" if not isinstance(given[0], Pair) else "test_refusals.Pair")


def test_a_setting_of_other_data(tmp_path: Path) -> None:
    state, owner = owners("encoder")
    state = replace(state, overrides=state.overrides.set("torch._inductor.config.x", {owner: frozenset([1])}))
    refused(state, tmp_path, "a builtins.frozenset at an override")


def test_a_state_that_is_not_whole(tmp_path: Path) -> None:
    """What would be refused when it is loaded is refused when it is saved."""
    state = whole_state()
    refused(replace(state, owners=state.owners.drop(0)), tmp_path, "the token of an owner of this state")
    refused(replace(state, key=torch.zeros(3, 2, dtype=torch.uint32)), tmp_path, "a random key")
    refused(replace(state, next_token=0), tmp_path, "the token of an owner of this state")


def test_a_description_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scoped_fn._checkpoint.header.MAX_HEADER_BYTES", 1000)
    refused(list(range(1000)), tmp_path, "a description of at most 1000 bytes")
