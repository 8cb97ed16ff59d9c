"""What the functions refuse, at the front door and in words that say what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from scoped_fn import kernels

pytestmark = pytest.mark.usefixtures("one_thread")

E4M3 = torch.float8_e4m3fn
X, ONE, ROW = torch.randn(4, 32), torch.tensor(1.0), torch.ones(32)
HISTORY, SCALES = torch.ones(3, 2), torch.ones(2)

# Each function that takes x, as a call with one argument.
OF_X: dict[str, Callable[[Any], Any]] = {
    "quantize": lambda x: kernels.quantize(x, ONE, E4M3),
    "quantize_current": lambda x: kernels.quantize_current(x, E4M3),
    "quantize_blocks": lambda x: kernels.quantize_blocks(x, E4M3),
    "quantize_mx": lambda x: kernels.quantize_mx(x, E4M3),
    "quantize_nvfp4": kernels.quantize_nvfp4,
    "rms_norm_quantize": lambda x: kernels.rms_norm_quantize(x, ROW, ONE, E4M3),
    "layer_norm_quantize": lambda x: kernels.layer_norm_quantize(x, ROW, ROW, ONE, E4M3),
}
OF_DTYPE: dict[str, Callable[[Any], Any]] = {
    "quantize": lambda dtype: kernels.quantize(X, ONE, dtype),
    "quantize_current": lambda dtype: kernels.quantize_current(X, dtype),
    "quantize_blocks": lambda dtype: kernels.quantize_blocks(X, dtype),
    "quantize_mx": lambda dtype: kernels.quantize_mx(X, dtype),
    "rms_norm_quantize": lambda dtype: kernels.rms_norm_quantize(X, ROW, ONE, dtype),
    "layer_norm_quantize": lambda dtype: kernels.layer_norm_quantize(X, ROW, ROW, ONE, dtype),
    "silu_gate_quantize": lambda dtype: kernels.silu_gate_quantize(X, X, ONE, dtype),
}
# A scale of the tensor; `quantize` alone takes one of each row too.
OF_SCALE: dict[str, Callable[[Any], Any]] = {
    "quantize": lambda scale: kernels.quantize(X, scale, E4M3),
    "rms_norm_quantize": lambda scale: kernels.rms_norm_quantize(X, ROW, scale, E4M3),
    "layer_norm_quantize": lambda scale: kernels.layer_norm_quantize(X, ROW, ROW, scale, E4M3),
    "silu_gate_quantize": lambda scale: kernels.silu_gate_quantize(X, X, scale, E4M3),
}
OF_ROW: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "rms_norm_quantize": ("weight", lambda row: kernels.rms_norm_quantize(X, row, ONE, E4M3)),
    "layer_norm_quantize, weight": ("weight", lambda row: kernels.layer_norm_quantize(X, row, ROW, ONE, E4M3)),
    "layer_norm_quantize, bias": ("bias", lambda row: kernels.layer_norm_quantize(X, ROW, row, ONE, E4M3)),
}
NEGATIVE: dict[str, Callable[[float], Any]] = {
    "quantize_current": lambda number: kernels.quantize_current(X, E4M3, epsilon=number),
    "quantize_blocks": lambda number: kernels.quantize_blocks(X, E4M3, epsilon=number),
    "rms_norm_quantize": lambda number: kernels.rms_norm_quantize(X, ROW, ONE, E4M3, eps=number),
    "layer_norm_quantize": lambda number: kernels.layer_norm_quantize(X, ROW, ROW, ONE, E4M3, eps=number),
}


def _refused(kind: type[Exception], pattern: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """The call raises that very error, and its text has the form and matches the pattern."""
    with pytest.raises(kind, match=pattern) as refusal:
        call(*arguments, **options)
    assert re.fullmatch(r"Expected .+, got .+\. .+\.", str(refusal.value)), str(refusal.value)
    assert type(refusal.value) is kind


@pytest.mark.parametrize("function", OF_X)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64, E4M3], ids=str)
def test_x_of_another_dtype(function: str, dtype: torch.dtype) -> None:
    pattern = f"Expected x in float32, bfloat16 or float16, got {dtype}. Convert it"
    _refused(TypeError, pattern, OF_X[function], X.to(dtype))


@pytest.mark.parametrize("function", OF_X)
@pytest.mark.parametrize("x", [[1.0, 2.0], 3.0, None], ids=["list", "float", "none"])
def test_x_that_is_no_tensor(function: str, x: object) -> None:
    _refused(TypeError, f"Expected x to be a tensor, got {type(x).__name__}. Pass", OF_X[function], x)


@pytest.mark.parametrize("name", ["gate", "up"])
def test_gate_and_up_of_another_dtype(name: str) -> None:
    tensors = {"gate": X, "up": X} | {name: X.double()}
    pattern = f"Expected {name} in float32, bfloat16 or float16, got torch.float64"
    _refused(TypeError, pattern, kernels.silu_gate_quantize, tensors["gate"], tensors["up"], ONE, E4M3)


def test_gate_and_up_of_different_shapes() -> None:
    pattern = r"Expected up of shape \(4, 32\), as gate, got \(4, 1\)"
    _refused(ValueError, pattern, kernels.silu_gate_quantize, X, X[:, :1], ONE, E4M3)


@pytest.mark.parametrize("function", OF_DTYPE)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, "e4m3"])
def test_an_unknown_fp8_dtype(function: str, dtype: object) -> None:
    pattern = f"Expected dtype to be torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}. Choose"
    _refused(TypeError, pattern, OF_DTYPE[function], dtype)


@pytest.mark.parametrize("function", OF_SCALE)
@pytest.mark.parametrize("shape", [(1,), (4,), (1, 1), (32, 1), (4, 32), (1, 4)], ids=str)
def test_a_scale_of_another_shape(function: str, shape: tuple[int, ...]) -> None:
    pattern = rf"Expected scale of shape \(\).*, got {re.escape(str(shape))}. Reshape"
    _refused(ValueError, pattern, OF_SCALE[function], torch.ones(shape))


@pytest.mark.parametrize("function", [name for name in OF_SCALE if name != "quantize"])
def test_a_scale_of_each_row_where_one_of_the_tensor_is_wanted(function: str) -> None:
    _refused(ValueError, r"Expected scale of shape \(\), got \(4, 1\)", OF_SCALE[function], torch.ones(4, 1))


@pytest.mark.parametrize("function", OF_SCALE)
@pytest.mark.parametrize("scale", [1.0, 1, torch.tensor(1), torch.tensor(1.0, dtype=torch.float64)])
def test_a_scale_of_another_type(function: str, scale: object) -> None:
    got = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
    _refused(TypeError, f"Expected scale to be a float32 tensor, got {got}. Pass", OF_SCALE[function], scale)


@pytest.mark.parametrize("function", OF_SCALE)
def test_a_scale_on_another_device(function: str) -> None:
    _refused(ValueError, "Expected scale on cpu, got meta. Move it", OF_SCALE[function], ONE.to("meta"))


@pytest.mark.parametrize("function", OF_ROW)
@pytest.mark.parametrize(
    ("row", "got"),
    [(torch.ones(31), "(31,) in torch.float32"), (ROW[None], "(1, 32)"), (ROW.int(), "(32,) in torch.int32")],
    ids=["short", "2-d", "int"],
)
def test_a_weight_or_bias_that_does_not_fit(function: str, row: torch.Tensor, got: str) -> None:
    name, call = OF_ROW[function]
    _refused(ValueError, rf"Expected {name} of shape \(32,\) in float32.*, got {re.escape(got)}", call, row)


@pytest.mark.parametrize("function", OF_ROW)
def test_a_weight_or_bias_on_another_device(function: str) -> None:
    name, call = OF_ROW[function]
    _refused(ValueError, f"Expected {name} on cpu, got meta", call, ROW.to("meta"))


@pytest.mark.parametrize("function", NEGATIVE)
@pytest.mark.parametrize("number", [-1e-6, -torch.inf, torch.nan])
def test_a_negative_epsilon(function: str, number: float) -> None:
    _refused(ValueError, rf"Expected eps\w* of at least 0, got {number}. Pass", NEGATIVE[function], number)


@pytest.mark.parametrize("block_rows", [0, 2, 16, 64, 256, "128", None])
def test_blocks_of_other_rows(block_rows: object) -> None:
    pattern = f"Expected block_rows to be 1 or 128, got {block_rows!r}. Choose"
    _refused(ValueError, pattern, kernels.quantize_blocks, X, E4M3, block_rows=block_rows)


@pytest.mark.parametrize("block_rows", [0, 2, 128])
def test_blocks_of_four_bits_of_other_rows(block_rows: int) -> None:
    pattern = f"Expected block_rows to be 1 or 16, got {block_rows}. Choose"
    _refused(ValueError, pattern, kernels.quantize_nvfp4, X, block_rows=block_rows)


def test_noise_that_does_not_fit() -> None:
    call = kernels.quantize_nvfp4
    _refused(ValueError, r"Expected noise of shape \(4, 32\), got \(4, 16\)", call, X, noise=torch.rand(4, 16))
    _refused(TypeError, "Expected noise to be a float32 tensor, got torch.float64", call, X, noise=X.double())
    _refused(TypeError, "Expected noise to be a float32 tensor, got float", call, X, noise=0.5)


@pytest.mark.parametrize(("shape", "signs"), [((4, 15), (16,)), ((), (16,)), ((4, 16), (8,)), ((4, 16), (1, 16))])
def test_a_transform_that_does_not_fit(shape: tuple[int, ...], signs: tuple[int, ...]) -> None:
    pattern = rf"K a multiple of 16, and signs \(16,\), got {re.escape(str(shape))} and {re.escape(str(signs))}"
    _refused(ValueError, pattern, kernels.hadamard_16, torch.ones(shape), torch.ones(signs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, E4M3, None, "float32"])
def test_dequantize_to_another_dtype(dtype: object) -> None:
    q = kernels.quantize(X, ONE, E4M3)
    pattern = "Expected dtype to be torch.float32 or torch.bfloat16 or torch.float16, got .*Choose"
    _refused(ValueError, pattern, kernels.dequantize, q, dtype)


@pytest.mark.parametrize("shape", [(2, 1), (4, 2), (32, 1), (1, 4)], ids=str)
def test_dequantize_with_scales_that_do_not_fit(shape: tuple[int, int]) -> None:
    q = kernels.quantize(X, ONE, E4M3)._replace(scale_inv=torch.ones(shape))
    pattern = rf"Expected scales along the rows of .*\(4, 32\), got scales of shape {re.escape(str(shape))}"
    _refused(ValueError, pattern, kernels.dequantize, q)


@pytest.mark.parametrize(
    ("data", "scale_inv"),
    [(X, ONE), (X.to(E4M3), ONE.double()), (X.to(E4M3), ONE.int()), (X.to(torch.uint8), ONE)],
    ids=["float32 data", "float64 scales", "int scales", "four bits with float32 scales"],
)
def test_dequantize_of_other_types(data: torch.Tensor, scale_inv: torch.Tensor) -> None:
    q = kernels.Quantized(data, None, None, scale_inv, None)
    _refused(TypeError, rf"got {data.dtype} with {scale_inv.dtype}", kernels.dequantize, q)


def _current(rows: int, columns: int) -> kernels.Quantized:
    return kernels.quantize_current(torch.randn(rows, columns), E4M3, transpose=True)


def test_inner_sizes_that_differ() -> None:
    a, weight = _current(4, 32), _current(6, 31)
    pattern = r"Expected b of shape \(K, N\) = \(32, N\) for a of shape \(4, 32\), got \(31, 6\)"
    _refused(ValueError, pattern, kernels.scaled_mm, a, weight.mT)


def test_a_weight_that_was_not_transposed() -> None:
    a, weight = _current(4, 32), _current(6, 32)
    _refused(ValueError, r"got \(6, 32\). A weight \(N, K\) enters as w.mT", kernels.scaled_mm, a, weight)


@pytest.mark.parametrize("scaling", ["row", "1x128", "mx"])
@pytest.mark.parametrize("side", ["a", "b"])
def test_scales_that_run_along_the_dimension_that_stays(scaling: str, side: str) -> None:
    """Without a copy that was quantized along the other dimension there is nothing to sum over."""
    x = torch.randn(160, 160)
    table = {
        "row": lambda: kernels.quantize(x, torch.ones(160, 1), E4M3),
        "1x128": lambda: kernels.quantize_blocks(x, E4M3),
        "mx": lambda: kernels.quantize_mx(x, E4M3),
    }
    wrong, right = table[scaling](), _current(160, 160)
    operands = (wrong.mT, right) if side == "a" else (right, wrong)
    pattern = r"Expected scales along the rows of .*\(160, 160\).* Quantize with transpose=True"
    _refused(ValueError, pattern, kernels.scaled_mm, *operands)


@pytest.mark.parametrize("bias", [torch.ones(5), torch.ones(1, 6), torch.ones(6).double(), ONE], ids=str)
def test_a_bias_that_does_not_fit(bias: torch.Tensor) -> None:
    pattern = rf"Expected bias of shape \(6,\) in float32.*, got {re.escape(str(tuple(bias.shape)))} in {bias.dtype}"
    _refused(ValueError, pattern, kernels.scaled_mm, _current(4, 32), _current(6, 32).mT, bias=bias)


@pytest.mark.parametrize("out_dtype", [torch.float64, torch.int32, E4M3, None])
def test_a_result_of_another_dtype(out_dtype: object) -> None:
    a, weight = _current(4, 32), _current(6, 32)
    _refused(
        ValueError, "Expected out_dtype to be torch.float32 or", kernels.scaled_mm, a, weight.mT, out_dtype=out_dtype
    )


def test_operands_on_several_devices() -> None:
    a, weight = _current(4, 32), _current(6, 32)
    elsewhere = kernels.Quantized(*(None if one is None else one.to("meta") for one in weight))
    _refused(ValueError, "Expected b on cpu, got meta. Move it", kernels.scaled_mm, a, elsewhere.mT)
    bias = torch.ones(6, device="meta")
    _refused(ValueError, "Expected bias on cpu, got meta. Move it", kernels.scaled_mm, a, weight.mT, bias=bias)


@pytest.mark.parametrize(
    ("history", "got"),
    [
        (torch.ones(3), "(3,)"),
        (torch.ones(2, 3, 1), "(2, 3, 1)"),
        (ONE, "()"),
        (torch.ones(0, 2), "(0, 2)"),
        ([[1.0]], "list"),
    ],
    ids=["1-d", "3-d", "0-d", "no row", "list"],
)
def test_a_history_that_is_no_matrix(history: object, got: str) -> None:
    pattern = rf"Expected amax_history of shape \(L, n\) with L >= 1, got {re.escape(got)}"
    _refused(ValueError, pattern, kernels.update_scales, history, SCALES, fp8_max=448.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32], ids=str)
def test_histories_and_scales_of_another_dtype(dtype: torch.dtype) -> None:
    call = kernels.update_scales
    pattern = "Expected {} to be a float32 tensor, got " + str(dtype)
    _refused(TypeError, pattern.format("amax_history"), call, HISTORY.to(dtype), SCALES, fp8_max=448.0)
    _refused(TypeError, pattern.format("scale"), call, HISTORY, SCALES.to(dtype), fp8_max=448.0)
    _refused(TypeError, pattern.format("fp8_max"), call, HISTORY, SCALES, fp8_max=SCALES.to(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 2)], ids=str)
def test_scales_that_do_not_fit_the_history(shape: tuple[int, ...]) -> None:
    pattern = rf"of shape \(2,\), got {re.escape(str(shape))}"
    _refused(ValueError, f"Expected scale {pattern}", kernels.update_scales, HISTORY, torch.ones(shape), fp8_max=448.0)
    if shape == ():  # one for all columns
        return
    maxima = torch.full(shape, 448.0)
    _refused(ValueError, f"Expected fp8_max {pattern}", kernels.update_scales, HISTORY, SCALES, fp8_max=maxima)


@pytest.mark.parametrize("algorithm", ["mean", "MAX", "", None, max])
def test_an_unknown_algorithm(algorithm: object) -> None:
    pattern = f"Expected algorithm to be 'max' or 'most_recent', got {re.escape(repr(algorithm))}. Choose"
    _refused(ValueError, pattern, kernels.update_scales, HISTORY, SCALES, fp8_max=448.0, algorithm=algorithm)


def test_scales_of_the_update_on_another_device() -> None:
    call = kernels.update_scales
    _refused(ValueError, "Expected scale on cpu, got meta", call, HISTORY, SCALES.to("meta"), fp8_max=SCALES)
    _refused(ValueError, "Expected fp8_max on cpu, got meta", call, HISTORY, SCALES, fp8_max=SCALES.to("meta"))


def test_options_are_keywords_only() -> None:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: kernels.quantize(X, ONE, E4M3, True),
        lambda: kernels.quantize_current(X, E4M3, True),
        lambda: kernels.quantize_blocks(X, E4M3, 128),
        lambda: kernels.quantize_mx(X, E4M3, True),
        lambda: kernels.quantize_nvfp4(X, 16),
        lambda: kernels.scaled_mm(_current(4, 32), _current(6, 32).mT, None),
        lambda: kernels.update_scales(HISTORY, SCALES, 448.0),
    )
    for call in calls:
        with pytest.raises(TypeError, match="positional argument"):
            call()


@pytest.mark.parametrize("margin", [torch.nan, torch.inf, -1100.0, 150.0])
def test_a_margin_that_float32_has_no_power_for(margin: float) -> None:
    history = torch.ones(2, 3)
    with pytest.raises(ValueError, match=rf"Expected margin from -127 to 149, .* got {margin}\. Use 0"):
        kernels.update_scales(history, torch.ones(3), fp8_max=448.0, margin=margin)


@pytest.mark.parametrize("fp8_max", [0.0, -448.0, torch.nan, torch.inf])
def test_a_largest_value_that_is_none(fp8_max: float) -> None:
    with pytest.raises(ValueError, match=rf"Expected fp8_max above 0, got {fp8_max}\. Pass 448"):
        kernels.update_scales(torch.ones(2, 3), torch.ones(3), fp8_max=fp8_max)


def test_operands_that_are_not_quantized() -> None:
    quantized = _current(6, 32)
    with pytest.raises(TypeError, match=r"Expected a to be Quantized, got Tensor\. Quantize it"):
        kernels.scaled_mm(torch.ones(4, 32), quantized.mT)
    with pytest.raises(TypeError, match=r"Expected b to be Quantized, got Tensor\. Quantize it"):
        kernels.scaled_mm(quantized, torch.ones(32, 4))
    with pytest.raises(TypeError, match=r"Expected quantized to be Quantized, got Tensor\. Quantize it"):
        kernels.dequantize(torch.ones(4, 32))


def test_vectors_that_are_no_tensors() -> None:
    with pytest.raises(TypeError, match=r"Expected bias to be a tensor, got list\. Pass a torch.Tensor"):
        kernels.scaled_mm(_current(4, 32), _current(6, 32).mT, bias=[1.0] * 6)
    with pytest.raises(TypeError, match=r"Expected weight to be a tensor, got list\. Pass a torch.Tensor"):
        kernels.rms_norm_quantize(torch.ones(4, 2), [1.0, 1.0], torch.ones(()), E4M3)


def test_scales_of_another_rank() -> None:
    quantized = _current(3, 32)._replace(scale_inv=torch.ones(3))
    with pytest.raises(ValueError, match=r"Expected scales of quantized of shape \(\) or \(R, C\), got \(3,\)"):
        kernels.dequantize(quantized)
