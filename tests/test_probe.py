"""Every private name of torch that the two doors use is there, and takes the parameters we give it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.codecache import CppPythonBindingsCodeCache

from scoped_fn import _torch as door
from scoped_fn._torch import aot, aten, dynamo, inductor, levels, nodes, tensors, tracing, wrapped
from scoped_fn.kernels import _opaque_op as kernels_door

DOORS = [*sorted(Path(str(door.__file__)).parent.glob("*.py")), Path(str(kernels_door.__file__))]
SOURCES = [path.read_text(encoding="utf-8") for path in DOORS]


def _imports() -> list[tuple[str, str | None]]:
    """(module, name) of each import from torch in the door's source; name is None for a module."""
    found: list[tuple[str, str | None]] = []
    for node in (node for source in SOURCES for node in ast.walk(ast.parse(source))):
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


@pytest.mark.parametrize("name", ["_set_fwd_grad_enabled", "_current_level"])
def test_forward_mode_has_what_the_kernels_ask(name: str) -> None:
    assert hasattr(torch.autograd.forward_ad, name)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


CALLS: dict[str, tuple[Any, int, set[str]]] = {
    # name in the door: (function, positional arguments given, keywords given)
    "CppPythonBindingsCodeCache.load_pybinding": (CppPythonBindingsCodeCache.load_pybinding, 2, set()),
    "dynamo_graph_capture_for_export": (dynamo.dynamo_graph_capture_for_export, 1, set()),
    "aot_export_joint_with_descriptors": (aot.aot_export_joint_with_descriptors, 3, {"decompositions"}),
    "min_cut_rematerialization_partition": (
        aot.min_cut_rematerialization_partition,
        2,
        {"num_fwd_outputs", "static_lifetime_input_indices"},
    ),
    "compile_fx_inner": (inductor.compile_fx_inner, 2, {"is_backward", "is_inference"}),
    "joint_graph_passes": (inductor.joint_graph_passes, 1, {"input_device"}),
    "make_fx": (tracing.make_fx, 1, {"tracing_mode", "pre_dispatch", "_allow_non_fake_inputs"}),
    "FakeTensorMode": (tensors.FakeTensorMode, 0, {"allow_non_fake_inputs", "shape_env"}),
    "select_decomp_table": (inductor.select_decomp_table, 0, set()),
    "tracing": (aot.tracing, 1, set()),
    "TracingContext": (aot.TracingContext, 1, set()),
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
            dynamo.dynamo_config,
            ["assume_static_by_default", "automatic_dynamic_shapes", "specialize_int", "specialize_float"],
        ),
        (aot.functorch_config, ["backward_pass_autocast"]),
        (inductor.inductor_config, ["fallback_random"]),
    ],
    ids=["dynamo", "functorch", "inductor"],
)
def test_config_values_can_be_set_for_one_block(config: Any, keys: list[str]) -> None:
    for key in keys:
        before = getattr(config, key)
        with config.patch({key: before}):
            assert getattr(config, key) == before


def test_descriptors_have_the_fields_we_read() -> None:
    assert aot.PlainAOTInput(idx=3).idx == 3
    assert aot.PlainAOTOutput(idx=2).idx == 2
    assert aot.GradAOTOutput(grad_of=aot.PlainAOTInput(idx=1)).grad_of.idx == 1
    assert aot.TangentAOTInput(output=aot.PlainAOTOutput(idx=4)).output.idx == 4
    assert aot.InputMutationAOTOutput(mutated_input=aot.PlainAOTInput(idx=5)).mutated_input.idx == 5


def test_a_capture_carries_how_to_flatten_and_rebuild() -> None:
    x = torch.ones(2)
    gm = dynamo.dynamo_graph_capture_for_export(lambda x: {"y": x + 1})(x)
    (flat,) = gm._dynamo_bytecode_flatten(x)
    assert flat is x
    assert gm._dynamo_bytecode_unflatten((x,), (x,)) == {"y": x}


def test_levels_have_what_we_read() -> None:
    seen: list[tuple[int, str]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.extend((level.number, level.kind.name) for level in levels.levels())
        seen.append(levels.levels()[0].batch())
        assert wrapped.is_at(x, levels.innermost_level())
        return x.sum()

    torch.func.vmap(torch.func.grad(look))(torch.ones(3, 2))
    assert seen == [(1, "Vmap"), (2, "Grad"), (3, "error")]


def test_a_level_is_left_with_its_grad_modes_and_entered_again() -> None:
    with torch.no_grad():

        def look(x: torch.Tensor) -> torch.Tensor:
            level = levels.innermost_level()
            assert torch.is_grad_enabled()
            with levels.below(level):
                assert not torch.is_grad_enabled()
                assert not levels.levels()
                assert not wrapped.is_wrapped(wrapped.unwrap(x, level))
            assert torch.is_grad_enabled()
            assert len(levels.levels()) == 1
            return x.sum()

        torch.func.grad(look)(torch.ones(2))


def test_nodes_of_one_level_know_when_their_graph_is_kept() -> None:
    kept: list[bool] = []

    class Look(nodes.SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            kept.append(nodes.graph_is_kept())
            return grad

    x = torch.ones(2, requires_grad=True)
    with nodes.single_level_allowed():
        y = Look.apply(x).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    torch.autograd.grad(y, x)
    assert kept == [True, False]


def test_the_last_backward_of_a_level_is_known_from_a_user_s_own() -> None:
    found: list[bool] = []

    class Look(nodes.SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            level = ctx.level = levels.innermost_level()
            with levels.below(level, within=True):
                out = wrapped.unwrap(x, level) * 1
            return wrapped.wrap(out, level)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            found.append(nodes.is_last_backward(ctx.level, grad))
            return grad

    def inner(x: torch.Tensor) -> torch.Tensor:
        with nodes.single_level_allowed():
            return torch.autograd.grad(Look.apply(x).sum() * x.sum(), x, create_graph=True)[0].sum()

    torch.func.grad(inner)(torch.ones(2))
    assert found[0] is False
    assert found[-1] is True


@pytest.mark.parametrize("make", [lambda x: x.lerp_(x * 2, x), lambda x: x.addcmul_(x, x), lambda x: x.addcdiv_(x, x)])
def test_in_place_operations_can_be_made_functional_in_forward_mode(make: Callable[..., Any]) -> None:
    table = aten.visible_mutations()
    with torch.autograd.forward_ad.dual_level():
        gm = tracing.make_fx(lambda x: make(x.clone()), decomposition_table=table)(torch.ones(2))
        gm = aten.functional_graph(gm, [torch.ones(2)])
    expected = make(torch.full((2,), 0.5))
    torch.testing.assert_close(gm(torch.full((2,), 0.5)), expected)
