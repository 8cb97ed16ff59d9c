"""Every private name of torch that the one door uses is there, and takes the parameters we give it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scoped_fn import _torch as door

SOURCE = Path(door.__file__).read_text(encoding="utf-8")


def _imports() -> list[tuple[str, str | None]]:
    """(module, name) of each import from torch in the door's source; name is None for a module."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found += [(str(node.module), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names if alias.name.split(".")[0] == "torch"]
    return found


def test_the_door_imports_something() -> None:
    assert len(_imports()) > 10


@pytest.mark.parametrize(("module", "name"), _imports(), ids=lambda one: str(one))
def test_each_import_exists(module: str, name: str | None) -> None:
    found = importlib.import_module(module)
    assert name is None or hasattr(found, name)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


CALLS: dict[str, tuple[Any, int, set[str]]] = {
    # name in the door: (function, positional arguments given, keywords given)
    "dynamo_graph_capture_for_export": (door.dynamo_graph_capture_for_export, 1, set()),
    "aot_export_joint_with_descriptors": (door.aot_export_joint_with_descriptors, 3, {"decompositions"}),
    "min_cut_rematerialization_partition": (
        door.min_cut_rematerialization_partition,
        2,
        {"num_fwd_outputs", "static_lifetime_input_indices"},
    ),
    "compile_fx_inner": (door.compile_fx_inner, 2, {"is_backward", "is_inference"}),
    "joint_graph_passes": (door.joint_graph_passes, 1, {"input_device"}),
    "make_fx": (door.make_fx, 1, {"tracing_mode", "pre_dispatch", "_allow_non_fake_inputs"}),
    "FakeTensorMode": (door.FakeTensorMode, 0, {"allow_non_fake_inputs", "shape_env"}),
    "select_decomp_table": (door.select_decomp_table, 0, set()),
    "tracing": (door.tracing, 1, set()),
    "TracingContext": (door.TracingContext, 1, set()),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_of_the_door_fits_the_signature(name: str) -> None:
    function, positional, keywords = CALLS[name]
    parameters = _parameters(function)
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    assert takes_any or keywords <= set(parameters)
    rest_is_optional = [
        one.default is not inspect.Parameter.empty or key in keywords
        for index, (key, one) in enumerate(parameters.items())
        if index >= positional and one.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    assert all(rest_is_optional), f"{name} wants more arguments than we give it"


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (
            door.dynamo_config,
            ["assume_static_by_default", "automatic_dynamic_shapes", "specialize_int", "specialize_float"],
        ),
        (door.functorch_config, ["backward_pass_autocast"]),
        (door.inductor_config, ["fallback_random"]),
    ],
    ids=["dynamo", "functorch", "inductor"],
)
def test_config_values_can_be_set_for_one_block(config: Any, keys: list[str]) -> None:
    for key in keys:
        before = getattr(config, key)
        with config.patch({key: before}):
            assert getattr(config, key) == before


def test_descriptors_have_the_fields_we_read() -> None:
    assert door.PlainAOTInput(idx=3).idx == 3
    assert door.PlainAOTOutput(idx=2).idx == 2
    assert door.GradAOTOutput(grad_of=door.PlainAOTInput(idx=1)).grad_of.idx == 1
    assert door.TangentAOTInput(output=door.PlainAOTOutput(idx=4)).output.idx == 4
    assert door.InputMutationAOTOutput(mutated_input=door.PlainAOTInput(idx=5)).mutated_input.idx == 5


def test_a_capture_carries_how_to_flatten_and_rebuild() -> None:
    x = torch.ones(2)
    gm = door.dynamo_graph_capture_for_export(lambda x: {"y": x + 1})(x)
    (flat,) = gm._dynamo_bytecode_flatten(x)
    assert flat is x
    assert gm._dynamo_bytecode_unflatten((x,), (x,)) == {"y": x}
