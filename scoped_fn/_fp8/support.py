"""What FP8 asks of a GPU, answered from the state's constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from scoped_fn._errors import SpecError
from scoped_fn._state_check import check_state
from scoped_fn.passes.graph_pass import ReadConstants
from scoped_fn.state import CompilerState

CAPABILITY, TRITON = "cuda.capability", "triton.version"
LEAST_CAPABILITY, LEAST_TRITON = (8, 9), (3, 6)


def fp8_support(state: CompilerState) -> tuple[bool, str]:
    """Returns whether a GPU with the state's constants runs the FP8 kernels, and why not.

    The kernels of all recipes need compute capability 8.9 and Triton 3.6. A constant that is not set says nothing
    against it; `detect` sets those of this machine, and `set_constant` asks about another. A CPU runs all recipes.

    Example:
        >>> import scoped_fn as sf
        >>> fp8_support(sf.set_constant(sf.init_state(), "cuda.capability", (8, 0)))
        (False, 'compute capability 8.9 or more is needed, there is 8.0')
        >>> fp8_support(sf.set_constant(sf.init_state(), "cuda.capability", (10, 0)))
        (True, '')
    """
    check_state(state)
    reason = _why_not(state.constants)
    return not reason, reason


def check_support(state: CompilerState, device: torch.device | None) -> Mapping[str, Any]:
    """Returns the constants that FP8 code for a device depends on; raises `SpecError` if they rule it out."""
    if device is None or device.type != "cuda":
        return {}
    constants = ReadConstants(state.constants)
    reason = _why_not(constants)
    if reason:
        raise SpecError(f"Expected a GPU that runs FP8 kernels, got one that does not: {reason}. Train on another, or "
                        "without a recipe.")  # fmt: skip
    return constants.read


def _why_not(constants: Mapping[str, Any]) -> str:
    capability, triton = constants.get(CAPABILITY), constants.get(TRITON)
    if capability is not None and tuple(capability) < LEAST_CAPABILITY:
        return f"compute capability {_dotted(LEAST_CAPABILITY)} or more is needed, there is {_dotted(capability)}"
    if triton is not None and tuple(int(part) for part in triton.split(".")[:2]) < LEAST_TRITON:
        return f"Triton {_dotted(LEAST_TRITON)} or later is needed, there is {triton}"
    return ""


def _dotted(numbers: Any) -> str:
    return ".".join(map(str, numbers))
