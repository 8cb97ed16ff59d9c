"""Scales made from the tensor itself, seen through the results of a compiled linear function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import scoped_fn as sf
from scoped_fn.kernels import Quantizer
from tests.fp8.linears import Weighted, delayed, detached, numbers, products, scale, scoped
from tests.kernels import golden
from tests.kernels import numpy_oracle as oracle
from tests.kernels.numpy_oracle import E4M3, E5M2

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
Rule = Callable[[np.ndarray], tuple[oracle.Quantized, oracle.Format]]


def ramp(amax: float, size: int) -> torch.Tensor:
    """A matrix with that amax in its first row, and smaller numbers of the same order where it is finite."""
    reach = amax if math.isfinite(amax) else 3.0
    matrix = torch.linspace(-1, 1, size * size).reshape(size, size) * reach
    matrix[0, 0] = -amax
    return matrix


def seen(recipe: Any, name: str, matrix: torch.Tensor) -> np.ndarray:
    """The matrix as one linear function sees it: an input (E4M3) or a gradient (E5M2), times the identity."""
    one = torch.eye(len(matrix))
    if name == "e4m3":
        return products(recipe, matrix, one, one)["y"].numpy()
    return products(recipe, one, one, matrix)["dx"].numpy()


def by_scale(matrix: torch.Tensor, scale: float, fmt: oracle.Format) -> np.ndarray:
    """The matrix through codes of that scale, times the identity."""
    exact = oracle.decode(oracle.saturate(matrix.numpy(), np.float32(scale), fmt), fmt).astype(np.float64)
    return (exact / np.float64(np.float32(scale))) @ np.eye(len(matrix))


def current(case: golden.Current) -> Any:
    if not case.epsilon:
        return sf.Float8CurrentScaling(use_power_2_scales=case.power_of_2)
    quantizer = Quantizer("current", dtype=torch.float8_e4m3fn, power_of_2=case.power_of_2, epsilon=case.epsilon)
    return sf.CustomRecipe(lambda role: quantizer if role.tensor_type == "input" else Quantizer("current"))


@pytest.mark.parametrize("case", golden.CURRENT, ids=str)
def test_current_scaling(case: golden.Current) -> None:
    matrix = ramp(case.amax, 16)
    actual = seen(current(case), case.format, matrix)
    np.testing.assert_allclose(actual, by_scale(matrix, case.scale, FORMATS[case.format]), rtol=1e-6)


@pytest.mark.parametrize(
    "case", [case for case in golden.CURRENT if case.format == "e4m3" and not case.epsilon], ids=str
)
def test_blocks_follow_the_rule_of_current_scaling(case: golden.Current) -> None:
    matrix = ramp(case.amax, 16)
    matrix[1:] = 0  # a block is a row: what it shares a scale with is in it
    actual = seen(sf.Float8BlockScaling(use_f32_scales=not case.power_of_2), "e4m3", matrix)
    np.testing.assert_allclose(actual, by_scale(matrix, case.scale, E4M3), rtol=1e-6)


@pytest.mark.parametrize(("name", "amax", "byte"), golden.E8M0)
def test_mx_scales(name: str, amax: float, byte: int) -> None:
    matrix = ramp(amax, 32)
    matrix[1:] = 0
    actual = seen(sf.MXFP8BlockScaling(fp8_format=sf.Format.HYBRID), name, matrix)
    np.testing.assert_allclose(actual, by_scale(matrix, 2.0 ** (127 - byte), FORMATS[name]), rtol=1e-6)


def per_tensor(fmt: oracle.Format, power_of_2: bool = False) -> Rule:
    return lambda x: (oracle.quantize_current(x, fmt, power_of_2=power_of_2, transpose=True), fmt)


def blocks(rows: int, power_of_2: bool = True) -> Rule:
    return lambda x: (oracle.quantize_blocks(x, E4M3, block_rows=rows, power_of_2=power_of_2, transpose=True), E4M3)


def mx(fmt: oracle.Format = E4M3) -> Rule:
    return lambda x: (oracle.quantize_mx(x, fmt, transpose=True), fmt)


# recipe -> the rules of input, weight and gradient
RECIPES: dict[Any, tuple[Rule, Rule, Rule]] = {
    sf.Float8CurrentScaling(): (per_tensor(E4M3), per_tensor(E4M3), per_tensor(E5M2)),
    sf.Float8CurrentScaling(use_power_2_scales=True): (per_tensor(E4M3, True),) * 2 + (per_tensor(E5M2, True),),
    sf.Float8CurrentScaling(fp8_format=sf.Format.E4M3): (per_tensor(E4M3),) * 3,
    sf.Float8BlockScaling(): (blocks(1), blocks(128), blocks(1)),
    sf.Float8BlockScaling(use_f32_scales=True): (blocks(1, False), blocks(128, False), blocks(1, False)),
    sf.Float8BlockScaling(w_block_scaling_dim=1): (blocks(1),) * 3,
    sf.MXFP8BlockScaling(): (mx(),) * 3,
    sf.MXFP8BlockScaling(fp8_format=sf.Format.HYBRID): (mx(), mx(), mx(E5M2)),
}
SHAPES = [
    ((16, 32, 16), torch.float32),
    ((5, 640, 130), torch.float32),
    ((130, 7, 3), torch.float32),
    ((1, 1, 1), torch.float32),
    ((33, 130, 17), torch.bfloat16),
]


def sides(rule: Rule, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The matrix as a product sees it along its rows, and its transpose as one along its columns does."""
    q, fmt = rule(x.float().numpy())
    pairs = ((q.data, q.scale_inv), (q.data_t, q.scale_inv_t))
    rows, columns = (oracle.dequantize(data, scale_inv, fmt).astype(np.float64) for data, scale_inv in pairs)
    return rows, columns


def assert_product(actual: torch.Tensor, a: np.ndarray, b: np.ndarray, bias: np.ndarray | float = 0.0) -> None:
    """`actual` is a @ b.T + bias but for the rounding of float32 sums and of the result."""
    exact = a @ b.T + bias
    unit = torch.finfo(actual.dtype).eps
    bound = (a.shape[1] + 8) * 2.0**-24 * (np.abs(a) @ np.abs(b).T + np.abs(bias)) + unit * np.abs(exact) + 1e-38
    error = np.abs(actual.double().numpy() - exact)
    assert (error <= bound).all(), f"error {error.max()} where {bound.flat[error.argmax()]} is the bound"


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_linear_function_is_the_product_of_its_codes(
    recipe: Any, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    m, k, n = shape
    x, w, dy, b = (numbers(seed, *size).to(dtype) for seed, size in enumerate(((m, k), (n, k), (m, n), (n,))))
    x[:, 0] *= 100  # an outlier tells scales of blocks from one of the tensor
    actual = products(recipe, x, w, dy, b)
    (x_rows, x_columns), (w_rows, w_columns), (dy_rows, dy_columns) = map(sides, RECIPES[recipe], (x, w, dy))
    assert_product(actual["y"], x_rows, w_rows, b.double().numpy())
    assert_product(actual["dx"], dy_rows, w_columns)
    assert_product(actual["dw"], dy_columns, x_columns)
    torch.testing.assert_close(actual["db"], dy.sum(0), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_delayed_scaling_multiplies_by_the_scales_that_the_step_began_with() -> None:
    x, dy = numbers(0), numbers(1)
    state, fn = scoped(delayed(3, margin=1), Weighted(), x, dy)
    params = detached(fn)
    for factor in (1.0, 3.0, 0.7, 0.01):
        scales = (np.float32(scale(state, fn, role)) for role in ("input", "weight", "grad_output"))
        matrices = (factor * x, params["fc.weight"], factor * dy)
        formats = (E4M3, E4M3, E5M2)
        codes = map(oracle.quantize, (one.numpy() for one in matrices), scales, formats)
        xq, wq, dyq = (oracle.dequantize(q.data, q.scale_inv, fmt) for q, fmt in zip(codes, formats, strict=True))
        state, (loss, grads) = sf.value_and_grad(fn)(state, params, *matrices[::2])
        assert_product(grads["fc.weight"], dyq.T.astype(np.float64), xq.T.astype(np.float64))
        exact = ((xq.astype(np.float64) @ wq.T) * matrices[2].numpy()).sum()
        assert loss.item() == pytest.approx(exact, rel=1e-5, abs=1e-4)
