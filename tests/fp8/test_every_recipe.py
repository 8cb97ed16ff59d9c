"""Every recipe and override trains, in every way that gradients are taken, within the error of its format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scoped_fn as sf
from scoped_fn.kernels import Quantizer
from tests.fp8.scoped import rescoped, scoped

E5M2 = torch.float8_e5m2


def mixed(role: sf.QuantizerRole) -> Any:
    """Another quantizer for each role."""
    return {
        "input": Quantizer("current"),
        "weight": Quantizer("blocks", block_rows=128),
        "grad_output": sf.DelayedScalingRequest(amax_history_len=2),
    }[role.tensor_type]


RECIPES = {
    "delayed": sf.DelayedScaling(amax_history_len=2),
    "delayed e4m3": sf.DelayedScaling(amax_history_len=2, fp8_format=sf.Format.E4M3),
    "current": sf.Float8CurrentScaling(),
    "current pow2": sf.Float8CurrentScaling(use_power_2_scales=True),
    "current epsilon": sf.Float8CurrentScaling(fp8_quant_fwd_inp=sf.QParams(amax_epsilon=1e-3)),
    "block": sf.Float8BlockScaling(),
    "block f32": sf.Float8BlockScaling(use_f32_scales=True),
    "mx": sf.MXFP8BlockScaling(),
    "nvfp4": sf.NVFP4BlockScaling(),
    "nvfp4 plain": sf.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    "nvfp4 1d": sf.NVFP4BlockScaling(disable_2d_quantization=True),
    "custom": sf.CustomRecipe(mixed),
    **{
        f"{kind.__name__} {override}": kind(backward_override=override)
        for kind in (sf.Float8CurrentScaling, sf.Float8BlockScaling, sf.MXFP8BlockScaling, sf.NVFP4BlockScaling)
        for override in ("high_precision", "dequantized")
    },
}


class Product(nn.Module):
    """A loss whose gradients do not depend on the result: only the products of the backward are in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(40, 24)

    def forward(self, x: Tensor, dy: Tensor) -> Tensor:
        return (self.fc(x) * dy).sum()


def data() -> tuple[Product, Tensor, Tensor]:
    torch.manual_seed(0)
    return Product(), torch.randn(24, 40), torch.randn(24, 24)


def gradients(way: str, run: Any, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    state = run.state
    if way == "value_and_grad":
        for _ in range(2):  # the first step of delayed scaling has scales of 1
            state, (_, grads) = sf.value_and_grad(run.fn)(state, run.params, x, dy)
        return grads
    if way == "torch.func":
        return torch.func.grad(lambda params: run.fn(state, params, x, dy)[1])(run.params)
    leaves = {name: one.clone().requires_grad_() for name, one in run.params.items()}
    run.fn(state, leaves, x, dy)[1].backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("way", ["value_and_grad", "torch.func", "backward"])
def test_gradients_are_within_the_error_of_the_format(name: str, way: str) -> None:
    model, x, dy = data()
    grads = gradients(way, scoped(model, (x, dy), RECIPES[name]), x, dy)
    limit = 0.25 if "nvfp4" in name.lower() else 0.12
    exact = dy.T @ x
    assert 0 <= (grads["fc.weight"] - exact).norm() < limit * exact.norm()
    torch.testing.assert_close(grads["fc.bias"], dy.sum(0))
    is_exact = "high_precision" in name
    assert torch.allclose(grads["fc.weight"], exact, rtol=1e-5, atol=1e-4) == is_exact


def test_one_function_goes_through_every_recipe_and_back() -> None:
    model, x, dy = data()
    run = scoped(model, (x, dy), RECIPES["current"])
    seen: dict[str, Tensor] = {}
    state = run.state
    for _ in range(2):
        for name, of in RECIPES.items():
            state, value = run.fn(rescoped(state, of), run.params, x, dy)
            if "delayed" not in name and name != "custom":
                assert torch.equal(seen.setdefault(name, value), value)
    captures = run.fn.cache_info().captures
    for of in RECIPES.values():
        state, _ = run.fn(rescoped(state, of), run.params, x, dy)
    assert run.fn.cache_info().captures == captures


@pytest.mark.parametrize(
    "fields",
    [
        {"fp8_quant_fwd_inp": sf.QParams(stochastic_rounding=True)},
        {"fp8_quant_bwd_grad": sf.QParams(amax_epsilon=-1.0)},
        {"fp8_quant_fwd_weight": sf.QParams(fp4_2d_quantization=True)},
        {"fp8_gemm_fprop": "fast"},
    ],
)
def test_fields_that_would_have_no_effect_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(sf.SpecError, match=f"Expected Float8CurrentScaling.{next(iter(fields))}=.*got"):
        sf.Float8CurrentScaling(**fields)


def test_a_request_with_a_format_by_name_is_refused_in_words() -> None:
    with pytest.raises(sf.SpecError, match="Expected DelayedScalingRequest.fp8_format=.*got 'HYBRID'"):
        sf.DelayedScalingRequest(fp8_format="HYBRID")


def test_operands_that_are_multiplied_are_transformed_alike() -> None:
    def of_role(role: sf.QuantizerRole) -> Quantizer:
        return Quantizer("nvfp4", hadamard=role.tensor_type == "input")

    with pytest.raises(ValueError, match="Expected hadamard of input and grad_output alike"):
        scoped(data()[0], data()[1:], sf.CustomRecipe(of_role))


class TwoWays(nn.Module):
    """A weight that two matmuls read in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.w).tanh() @ self.w.T).square().mean()


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mx"])
def test_a_weight_that_is_read_in_two_ways_is_quantized_right(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    run = scoped(TwoWays(), (x,), RECIPES[name])
    state, weights = sf.quantize_weights(run.state, run.fn, run.params)
    assert torch.equal(run.fn(state, weights, x)[1], run.fn(run.state, run.params, x)[1])


class AddMM(nn.Module):
    """A layer by addmm."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.b, x, self.w)


def test_addmm_has_the_dtype_of_autocast() -> None:
    torch.manual_seed(0)
    model, x = AddMM(), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        run = scoped(model, (x,), "current")
        y = run.fn(run.state, run.params, x)[1]
        exact = model(x)
    assert run.fn.sites == ("w",)
    assert y.dtype == exact.dtype == torch.bfloat16
    assert (y - exact).norm() < 0.1 * exact.norm()
