"""FP8 recipes: frozen values with TransformerEngine's field names and defaults.

A recipe says how the three tensors of a matmul (input, weight, gradient of the output) become low precision.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from scoped_fn._fp8.recipe_checks import (
    check_blocks,
    check_bool,
    check_choice,
    check_common,
    check_delayed,
    check_split,
    check_unsupported,
)
from scoped_fn.kernels import MatmulRule, Quantizer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = (448.0, 57344.0)


class Format(enum.Enum):
    """The number formats of a recipe: the largest numbers of forward and backward tensors."""

    E4M3 = (FP8_MAX[0], FP8_MAX[0])
    E5M2 = (FP8_MAX[1], FP8_MAX[1])
    HYBRID = FP8_MAX
    E2M1 = (6.0, 6.0)

    @property
    def backward_dtype(self) -> torch.dtype:
        """The dtype of gradients."""
        return E5M2 if self is Format.HYBRID else E4M3


class MMParams(NamedTuple):
    """How a matmul adds up.

    Attributes:
        use_split_accumulator: Whether partial sums are added in float32; False lets tensor cores keep the whole sum.
    """

    use_split_accumulator: bool = True


SPLIT, WHOLE = MMParams(use_split_accumulator=True), MMParams(use_split_accumulator=False)


class QParams(NamedTuple):
    """How a tensor is scaled.

    Attributes:
        power_2_scale: Whether scales are powers of two.
        amax_epsilon: The least amax to reckon with.
        random_hadamard_transform: NVFP4: whether the operand of the weight gradient is transformed.
        stochastic_rounding: NVFP4: whether codes are rounded at random.
        fp4_2d_quantization: NVFP4: whether 16 x 16 elements share a scale.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclass(frozen=True)
class QuantizerRole:
    """One tensor of one site, as `CustomRecipe` sees it.

    Attributes:
        module_type: "linear" or "matmul".
        tensor_type: "input", "weight" or "grad_output".
        name: The site.
    """

    module_type: str
    tensor_type: str
    name: str


class WithHistory:
    """What scales can be updated by."""

    fp8_format: Format

    def fp8_max(self, role: str) -> float:
        """Returns the largest number of the format of a role."""
        return self.fp8_format.value[role == "grad_output"]


@dataclass(frozen=True)
class DelayedScalingRequest(WithHistory):
    """What a `CustomRecipe` answers where it wants delayed scaling; fields are those of `DelayedScaling`."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., torch.Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        check_delayed(self)


class Recipe:
    """What all recipes have in common."""

    fp8_format: Format

    def rule(self, module_type: str, name: str) -> MatmulRule:
        """Returns how the matmul of a site is computed."""
        raise NotImplementedError

    @property
    def graph_part(self) -> Recipe:
        """The recipe without what concerns the update of scales alone: compiled code depends on nothing else."""
        return self

    @property
    def delayed(self) -> Any:
        """What scales are updated by, where the recipe alone says it; None where no history is kept."""
        return None


@dataclass(frozen=True)
class DelayedScaling(WithHistory, Recipe):
    """One scale for each tensor, from the amaxes of earlier steps.

    Attributes:
        margin: Scales are smaller by 2 ** margin.
        fp8_format: HYBRID (gradients in E5M2) or E4M3.
        amax_history_len: How many steps the scale looks back on.
        amax_compute_algo: "max" of the window, "most_recent", or `(history (L, n)) -> amax (n,)`; row 0 of the history
            is the step that ends, rows 1 to L - 1 the past, oldest first.
        scaling_factor_compute_algo: `(amax (n,), old scale (n,), fp8_max (n,), recipe) -> scale (n,)`, or None for
            ``fp8_max * 2 ** -margin / amax``.
        reduce_amax: Whether amaxes are shared in the group of the scope.
        fp8_dpa: Attention in FP8; only False.
        fp8_mha: Attention with FP8 in- and outputs; only False.
        backward_override: Only None.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., torch.Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        check_common(self, (Format.HYBRID, Format.E4M3))
        check_delayed(self)
        check_unsupported(self, "backward_override", None)

    def rule(self, module_type: str, name: str) -> MatmulRule:
        """Returns how the matmul of a site is computed."""
        forward, backward = Quantizer("delayed"), Quantizer("delayed", self.fp8_format.backward_dtype)
        return MatmulRule(forward, forward, backward, (True, False, False))

    @property
    def graph_part(self) -> Recipe:
        """The recipe without what concerns the update of scales alone: the format is left."""
        return DelayedScaling(fp8_format=self.fp8_format)

    @property
    def delayed(self) -> Any:
        """What scales are updated by: this recipe."""
        return self


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """One scale for each tensor, from its own amax.

    Attributes:
        use_power_2_scales: Whether scales are rounded down to powers of two.
        fp8_format: HYBRID (gradients in E5M2) or E4M3.
        fp8_quant_fwd_inp: Of inputs; None follows `use_power_2_scales`.
        fp8_quant_fwd_weight: Of weights.
        fp8_quant_bwd_grad: Of gradients.
        fp8_gemm_fprop: Of y.
        fp8_gemm_dgrad: Of the gradient of the input.
        fp8_gemm_wgrad: Of the gradient of the weight.
        fp8_dpa: Attention in FP8; only False.
        fp8_mha: Attention with FP8 in- and outputs; only False.
        backward_override: None, "high_precision" (gradients by unquantized tensors) or "dequantized" (by the quantized
            input and weight, and the gradient as it is).
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_gemm_fprop: MMParams = WHOLE
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        check_common(self, (Format.HYBRID, Format.E4M3))
        check_bool(self, "use_power_2_scales")

    def rule(self, module_type: str, name: str) -> MatmulRule:
        """Returns how the matmul of a site is computed."""
        x, w, dy = (
            q or QParams() for q in (self.fp8_quant_fwd_inp, self.fp8_quant_fwd_weight, self.fp8_quant_bwd_grad)
        )
        dtypes = (E4M3, E4M3, self.fp8_format.backward_dtype)
        of_x, of_w, of_dy = (
            Quantizer("current", dtype, self.use_power_2_scales or q.power_2_scale, q.amax_epsilon)
            for q, dtype in zip((x, w, dy), dtypes, strict=True)
        )
        return MatmulRule(of_x, of_w, of_dy, _fast(self), _backward(self))


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """A scale for each 1 x 128 elements of inputs and gradients, and 128 x 128 of weights.

    Attributes:
        use_f32_scales: Whether scales are any float32; False rounds them down to powers of two.
        fp8_format: E4M3 (or HYBRID: gradients in E5M2).
        x_block_scaling_dim: 1 for 1 x 128, 2 for 128 x 128, of inputs.
        w_block_scaling_dim: Of weights.
        grad_block_scaling_dim: Of gradients.
        fp8_gemm_fprop: Of y; only with a split accumulator, and so are the other two.
        fp8_gemm_dgrad: Of the gradient of the input.
        fp8_gemm_wgrad: Of the gradient of the weight.
        fp8_dpa: Attention in FP8; only False.
        fp8_mha: Attention with FP8 in- and outputs; only False.
        backward_override: As in `Float8CurrentScaling`.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = SPLIT
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        check_common(self, (Format.E4M3, Format.HYBRID))
        check_bool(self, "use_f32_scales")
        check_blocks(self)
        check_split(self)

    def rule(self, module_type: str, name: str) -> MatmulRule:
        """Returns how the matmul of a site is computed."""
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        dtypes = (E4M3, E4M3, self.fp8_format.backward_dtype)
        of_x, of_w, of_dy = (
            Quantizer("blocks", dtype, not self.use_f32_scales, block_rows=1 if dim == 1 else 128)
            for dim, dtype in zip(dims, dtypes, strict=True)
        )
        return MatmulRule(of_x, of_w, of_dy, backward=_backward(self))


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """A power of two for each 32 elements along the dimension that is summed over.

    Attributes:
        margin: Of no effect, as in TransformerEngine.
        fp8_format: E4M3 (or HYBRID: gradients in E5M2).
        enable_2d_quantization: 32 x 32 elements of weights; only False.
        fp8_dpa: Attention in FP8; only False.
        fp8_mha: Attention with FP8 in- and outputs; only False.
        backward_override: As in `Float8CurrentScaling`.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        check_common(self, (Format.E4M3, Format.HYBRID))
        check_unsupported(self, "enable_2d_quantization", False)

    @property
    def graph_part(self) -> Recipe:
        """The recipe without the margin, which has no effect."""
        return self if self.margin == 0 else replace(self, margin=0)

    def rule(self, module_type: str, name: str) -> MatmulRule:
        """Returns how the matmul of a site is computed."""
        forward, backward = Quantizer("mx"), Quantizer("mx", self.fp8_format.backward_dtype)
        return MatmulRule(forward, forward, backward, (True, False, False), _backward(self))


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """E2M1 numbers with an E4M3 scale for each 16 elements: a reference, in plain torch on every device.

    Attributes:
        disable_rht: Whether to leave out the Hadamard transform of the operands of weight gradients.
        disable_stochastic_rounding: Whether to round gradients to nearest.
        disable_2d_quantization: Whether weights have 1 x 16 blocks instead of 16 x 16.
        row_scaled_activation: Only False.
        nvfp4_4over6: Only "none".
        nvfp4_4over6_e4m3_use_256: Of no effect without 4over6.
        nvfp4_4over6_err_mode: Of no effect without 4over6.
        fp4_format: E2M1.
        fp8_format: E4M3, of the scales.
        fp8_dpa: Attention in FP8; only False.
        fp8_mha: Attention with FP8 in- and outputs; only False.
        backward_override: As in `Float8CurrentScaling`.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        check_common(self, (Format.E4M3,))
        check_choice(self, "fp4_format", (Format.E2M1,))
        for name in ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"):
            check_bool(self, name)
        check_unsupported(self, "row_scaled_activation", False)
        check_unsupported(self, "nvfp4_4over6", "none")

    def rule(self, module_type: str, name: str) -> MatmulRule:
        """Returns how the matmul of a site is computed."""
        turned, random = not self.disable_rht, not self.disable_stochastic_rounding
        x = Quantizer("nvfp4", hadamard=turned)
        w = Quantizer("nvfp4", block_rows=1 if self.disable_2d_quantization else 16)
        dy = Quantizer("nvfp4", hadamard=turned, stochastic=random)
        return MatmulRule(x, w, dy, (True, False, False), _backward(self))


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Whatever a factory answers for each tensor.

    Attributes:
        qfactory: `(QuantizerRole) -> scoped_fn.kernels.Quantizer` or `DelayedScalingRequest`. It is asked once for each
            site and role when code is made, never in a step. All requests have to agree.
        fp8_format: For information.
        fp8_dpa: Attention in FP8; only False.
        fp8_mha: Attention with FP8 in- and outputs; only False.
        quantization_alignment: Of no effect: kernels pad by themselves.
        backward_override: As in `Float8CurrentScaling`.
    """

    qfactory: Callable[[QuantizerRole], Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    quantization_alignment: int = 128
    backward_override: str | None = None

    def __post_init__(self) -> None:
        check_common(self, (Format.HYBRID, Format.E4M3))
        check_choice(self, "quantization_alignment", tuple(range(1, 4097)))
        check_choice(self, "qfactory", (self.qfactory,) if callable(self.qfactory) else ("a function of a role",))

    def answers(self, module_type: str, name: str) -> list[Any]:
        """Returns what the factory answers for input, weight and grad_output of a site."""
        return [self.qfactory(QuantizerRole(module_type, role, name)) for role in ("input", "weight", "grad_output")]


def _fast(recipe: Any) -> tuple[bool, bool, bool]:
    gemms = (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
    return tuple(not gemm.use_split_accumulator for gemm in gemms)  # type: ignore[return-value]


def _backward(recipe: Any) -> str:
    return recipe.backward_override or "quantized"
