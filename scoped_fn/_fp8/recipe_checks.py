"""What recipes refuse, and in which words."""

from __future__ import annotations

import enum
from typing import Any, NoReturn

from scoped_fn._errors import SpecError

OVERRIDES = (None, "high_precision", "dequantized")


def refuse(recipe: Any, field: str, expected: str, advice: str) -> NoReturn:
    """Raises `SpecError` for a field."""
    got = getattr(recipe, field)
    raise SpecError(f"Expected {type(recipe).__name__}({field}=...) to be {expected}, got {got!r}. {advice}")


def check_common(recipe: Any, formats: tuple[enum.Enum, ...]) -> None:
    """Checks what all recipes have: the format, attention, the override of the backward."""
    if recipe.fp8_format not in formats:
        names = " or ".join(f"Format.{known.name}" for known in formats)
        advice = "Pure E5M2 does not train." if getattr(recipe.fp8_format, "name", "") == "E5M2" else "Choose one."
        refuse(recipe, "fp8_format", names, advice)
    for field in ("fp8_dpa", "fp8_mha"):
        check_unsupported(recipe, field, False)
    check_choice(recipe, "backward_override", OVERRIDES)
    for field in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
        if not hasattr(getattr(recipe, field, None), "use_split_accumulator") and hasattr(recipe, field):
            refuse(recipe, field, "an MMParams", "Write MMParams(use_split_accumulator=True).")
    for field in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        value = getattr(recipe, field, None)
        if value is not None and not hasattr(value, "power_2_scale"):
            refuse(recipe, field, "a QParams or None", "Write QParams(power_2_scale=True).")
        if value is not None:
            _check_qparams(recipe, field, value)


def _check_qparams(recipe: Any, field: str, value: Any) -> None:
    only_fp4 = ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization")
    if any(getattr(value, name) for name in only_fp4):
        refuse(recipe, field, "without what is for NVFP4", "NVFP4BlockScaling has fields of its own.")
    epsilon = value.amax_epsilon
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0 <= epsilon < float("inf"):
        refuse(recipe, field, "with amax_epsilon of at least 0", "Use 0.0.")
    if type(value.power_2_scale) is not bool:
        refuse(recipe, field, "with power_2_scale True or False", "Pass a bool.")


def check_delayed(recipe: Any) -> None:
    """Checks the fields of delayed scaling."""
    if type(recipe.margin) is not int or not -127 <= recipe.margin <= 149:
        refuse(recipe, "margin", "a whole number from -127 to 149", "Use 0.")
    if type(recipe.amax_history_len) is not int or recipe.amax_history_len < 1:
        refuse(recipe, "amax_history_len", "a whole number of at least 1", "Use 1024.")
    if recipe.amax_compute_algo not in ("max", "most_recent") and not callable(recipe.amax_compute_algo):
        refuse(recipe, "amax_compute_algo", "'max', 'most_recent' or a function", "Choose one of them.")
    if recipe.scaling_factor_compute_algo is not None and not callable(recipe.scaling_factor_compute_algo):
        refuse(recipe, "scaling_factor_compute_algo", "None or a function", "Use None.")
    check_bool(recipe, "reduce_amax")
    if getattr(recipe.fp8_format, "name", None) not in ("HYBRID", "E4M3"):
        refuse(recipe, "fp8_format", "Format.HYBRID or Format.E4M3", "Choose one.")


def check_bool(recipe: Any, field: str) -> None:
    """Checks that a field is True or False."""
    if type(getattr(recipe, field)) is not bool:
        refuse(recipe, field, "True or False", "Pass a bool.")


def check_choice(recipe: Any, field: str, choices: tuple[Any, ...]) -> None:
    """Checks that a field is one of the choices."""
    if getattr(recipe, field) not in choices:
        few = " or ".join(map(repr, choices)) if len(choices) < 6 else f"from {choices[0]} to {choices[-1]}"
        refuse(recipe, field, few, "Choose one of them.")


def check_unsupported(recipe: Any, field: str, only: Any) -> None:
    """Checks a field of which one value is supported."""
    if getattr(recipe, field) != only or type(getattr(recipe, field)) is not type(only):
        refuse(recipe, field, repr(only), "Anything else is not supported here.")


def check_blocks(recipe: Any) -> None:
    """Checks the dimensions of blocks: 1 or 2, and no product of two operands in blocks of 128 x 128."""
    fields = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
    for field in fields:
        check_choice(recipe, field, (1, 2))
    if sum(getattr(recipe, field) == 2 for field in fields) > 1:
        twice = [field for field in fields if getattr(recipe, field) == 2]
        refuse(recipe, twice[1], f"1 where {twice[0]} is 2", "No product takes two operands in blocks of 128 x 128.")


def check_split(recipe: Any) -> None:
    """Checks that all products add up in float32."""
    for field in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
        if not getattr(recipe, field).use_split_accumulator:
            refuse(recipe, field, "with a split accumulator", "Block scaling needs it.")
