"""What is refused, and in which words: wrong fields of recipes, wrong operations, float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.fp8.networks import mlp
from tests.fp8.scoped import KINDS, recipe, scoped

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", KINDS)
def test_float64_is_refused_in_words(kind: str) -> None:
    model, x = mlp().double(), torch.randn(3, 8, dtype=torch.float64)
    with pytest.raises(sf.SpecError, match=r"float64(.|\n)*skip"):
        scoped(model, (x,), kind)
    run = scoped(model, (x,), kind, skip=("0", "2"))
    torch.testing.assert_close(run.fn(run.state, run.params, x)[1], model(x).detach())


BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("DelayedScaling", {"fp8_format": "HYBRID"}),
    ("DelayedScaling", {"margin": "1"}),
    ("DelayedScaling", {"amax_history_len": 0}),
    ("DelayedScaling", {"amax_history_len": 2.5}),
    ("DelayedScaling", {"amax_compute_algo": "median"}),
    ("DelayedScaling", {"scaling_factor_compute_algo": "exact"}),
    ("DelayedScaling", {"backward_override": "dequantized"}),
    ("Float8CurrentScaling", {"fp8_gemm_fprop": True}),
    ("Float8CurrentScaling", {"use_power_2_scales": "yes"}),
    ("Float8CurrentScaling", {"backward_override": "exact"}),
    ("Float8BlockScaling", {"x_block_scaling_dim": 3}),
    ("Float8BlockScaling", {"x_block_scaling_dim": 2, "w_block_scaling_dim": 2}),
    ("MXFP8BlockScaling", {"fp8_format": 8}),
    ("CustomRecipe", {"qfactory": 1}),
]


@pytest.mark.parametrize(("name", "fields"), BAD_FIELDS, ids=str)
def test_a_wrong_field_of_a_recipe(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(sf.SpecError, match=rf"Expected(.|\n)*{next(iter(fields))[:4]}(.|\n)*got"):
        getattr(sf, name)(**fields)


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling"])
def test_training_in_e5m2_alone_is_refused(name: str) -> None:
    with pytest.raises(sf.SpecError, match="E5M2"):
        getattr(sf, name)(fp8_format=sf.Format.E5M2)


def test_block_products_need_split_accumulators() -> None:
    with pytest.raises(sf.SpecError, match="accumulator"):
        sf.Float8BlockScaling(fp8_gemm_fprop=sf.MMParams(use_split_accumulator=False))


def test_recipes_are_values() -> None:
    assert sf.DelayedScaling() == sf.DelayedScaling()
    assert hash(sf.DelayedScaling()) == hash(sf.DelayedScaling())
    assert sf.DelayedScaling() != sf.DelayedScaling(margin=1)
    assert sf.DelayedScaling() != sf.DelayedScaling(scaling_factor_compute_algo=max)
    assert sf.Float8CurrentScaling() != sf.Float8CurrentScaling(use_power_2_scales=True)
    assert sf.MXFP8BlockScaling() != sf.Float8BlockScaling()
    with pytest.raises(dataclasses.FrozenInstanceError):
        sf.DelayedScaling().margin = 1


@pytest.mark.parametrize(
    "operation",
    [
        lambda state: sf.end_autocast(state),
        lambda state: sf.end_autocast(sf.end_autocast(sf.autocast(state, recipe()))),
        lambda state: sf.autocast(state, "delayed"),
        lambda state: sf.autocast(state, None),
        lambda state: sf.autocast(state, sf.DelayedScaling),
        lambda state: sf.autocast(state, recipe(), sites="some"),
        lambda state: sf.autocast(state, recipe(), skip=(1,)),
        lambda state: sf.autocast(state, recipe(), enabled="yes"),
        lambda state: sf.autocast({}, recipe()),
        lambda state: sf.update_scales(state, 99),
        lambda state: sf.describe_fp8(state, 99),
        lambda state: sf.update_scales({}),
    ],
)
def test_a_wrong_operation_says_what_was_expected(operation: Callable[[sf.CompilerState], Any]) -> None:
    state = sf.init_state()
    with pytest.raises((TypeError, ValueError, KeyError, RuntimeError), match="Expected .*got"):
        operation(state)
    assert state.autocast == ()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16])
def test_an_input_of_another_dtype_than_the_weight_is_refused(dtype: torch.dtype) -> None:
    state = sf.autocast(sf.init_state(), sf.Float8CurrentScaling())
    state, fn = sf.compile(state, nn.Linear(8, 4), (torch.ones(2, 8),), backend="eager")
    with pytest.raises(Exception, match="Expected an input and a weight of one dtype.*got"):
        fn(state, fn.params, torch.ones(2, 8).to(dtype))


def test_a_step_in_place_of_a_function_is_refused_in_words() -> None:
    state = sf.autocast(sf.init_state(), sf.Float8CurrentScaling())
    state, fn = sf.compile(state, nn.Linear(8, 4), (torch.ones(2, 8),), backend="eager")
    with pytest.raises(sf.SpecError, match="Expected a compiled function, got a WholeStep"):
        sf.quantize_weights(state, sf.value_and_grad(fn), fn.params)
    with pytest.raises(TypeError, match="Expected a CompilerState, got a CompiledFn"):
        sf.describe_fp8(fn)
    with pytest.raises(sf.SpecError, match="Write recipe="):
        sf.Engine(nn.Linear(8, 4), (torch.ones(2, 8),), sf.DelayedScaling())


def test_an_engine_takes_dropout_where_it_is_asked_to() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))
    engine = sf.Engine(model, (torch.ones(2, 8),), recipe=sf.Float8CurrentScaling(), backend="eager", rng="torch")
    assert (engine(torch.ones(64, 8)) == 0).float().mean() > 0.2
