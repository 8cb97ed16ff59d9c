"""What a matmul in low precision does with each of its tensors, as values that an operator can take: as text."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from scoped_fn.kernels._checks import check_choice, check_not_negative
from scoped_fn.kernels._formats import BLOCK, E4M3, E5M2, NVFP4_BLOCK

KINDS: Final = ("delayed", "current", "blocks", "mx", "nvfp4", "none")
NAMES: Final = MappingProxyType({E4M3: "e4m3", E5M2: "e5m2"})
BACKWARDS: Final = ("quantized", "dequantized", "high_precision")


@dataclass(frozen=True)
class Quantizer:
    """How one tensor of a matmul is quantized.

    Attributes:
        kind: "delayed" (a scale that is given), "current" (from the tensor's own amax), "blocks", "mx", "nvfp4", or
            "none": it stays in high precision.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2; of no meaning for "nvfp4" and "none".
        power_of_2: Whether scales are rounded down to powers of two ("current", "blocks").
        epsilon: The least amax to reckon with ("current", "blocks").
        block_rows: 1 or 128 ("blocks"), 1 or 16 ("nvfp4").
        hadamard: Whether the transposed matrix is transformed by `hadamard_16` first ("nvfp4").
        stochastic: Whether codes are rounded up or down at random ("nvfp4").

    Example:
        >>> str(Quantizer("current", torch.float8_e5m2, power_of_2=True))
        'current e5m2 pow2'
    """

    kind: str
    dtype: torch.dtype = E4M3
    power_of_2: bool = False
    epsilon: float = 0.0
    block_rows: int = 1
    hadamard: bool = False
    stochastic: bool = False

    def __post_init__(self) -> None:
        check_choice(self.kind, "kind", KINDS)
        check_choice(self.dtype, "dtype", tuple(NAMES))
        check_choice(self.block_rows, "block_rows", (1, NVFP4_BLOCK if self.kind == "nvfp4" else BLOCK))
        check_not_negative(self.epsilon, "epsilon")

    def __str__(self) -> str:
        words = [self.kind]
        words += [NAMES[self.dtype]] if self.kind not in ("nvfp4", "none") else []
        words += [f"rows={self.block_rows}"] if self.kind in ("blocks", "nvfp4") else []
        words += [f"eps={float(self.epsilon)!r}"] if self.epsilon else []
        flags = {"pow2": self.power_of_2, "hadamard": self.hadamard, "stochastic": self.stochastic}
        return " ".join([*words, *(word for word, is_set in flags.items() if is_set)])

    @classmethod
    def parse(cls, text: str) -> Quantizer:
        """Returns the quantizer that the text describes."""
        kind, *words = text.split()
        dtypes = {name: dtype for dtype, name in NAMES.items()}
        numbers = dict(word.split("=") for word in words if "=" in word)
        return cls(
            kind,
            next((dtypes[word] for word in words if word in dtypes), E4M3),
            "pow2" in words,
            float(numbers.get("eps", 0.0)),
            int(numbers.get("rows", 1)),
            "hadamard" in words,
            "stochastic" in words,
        )


HIGH_PRECISION: Final = Quantizer("none")


@dataclass(frozen=True)
class MatmulRule:
    """How a matmul and its two gradients are computed.

    Attributes:
        input: Of x.
        weight: Of w.
        grad_output: Of the gradient of the result.
        fast_accum: Whether the tensor cores may keep the whole sum, for y, dx, dw.
        backward: "quantized"; "dequantized", by the quantized x and w with the gradient as it is; "high_precision", by
            x, w and the gradient as they are.
        calibrating: Whether everything is computed in high precision, and amaxes are recorded.

    Example:
        >>> str(MatmulRule(Quantizer("mx"), Quantizer("mx"), Quantizer("mx")))
        'x: mx e4m3; w: mx e4m3; dy: mx e4m3; fast: 000'
        >>> MatmulRule.parse(_).input.kind
        'mx'
    """

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    fast_accum: tuple[bool, bool, bool] = (False, False, False)
    backward: str = "quantized"
    calibrating: bool = False

    def __post_init__(self) -> None:
        check_choice(self.backward, "backward", BACKWARDS)
        if self.weight.hadamard or self.input.hadamard != self.grad_output.hadamard:
            raise ValueError(
                "Expected hadamard of input and grad_output alike, which are multiplied, and not of weight, got "
                f"'{self}'. Set it on both or on none."
            )

    def __str__(self) -> str:
        parts = [f"x: {self.input}", f"w: {self.weight}", f"dy: {self.grad_output}"]
        parts.append("fast: " + "".join(str(int(fast)) for fast in self.fast_accum))
        parts += [f"backward: {self.backward}"] if self.backward != "quantized" else []
        return "; ".join([*parts, *(["calibrating: yes"] if self.calibrating else [])])

    @classmethod
    def parse(cls, text: str) -> MatmulRule:
        """Returns the rule that the text describes."""
        parts = dict(part.split(": ") for part in text.split("; "))
        x, w, dy = (Quantizer.parse(parts[name]) for name in ("x", "w", "dy"))
        fast = parts["fast"]
        backward = parts.get("backward", "quantized")
        return cls(x, w, dy, (fast[0] == "1", fast[1] == "1", fast[2] == "1"), backward, "calibrating" in parts)

    @property
    def forward_quantizers(self) -> tuple[Quantizer, Quantizer]:
        """What y is computed with: of x and w."""
        return (HIGH_PRECISION, HIGH_PRECISION) if self.calibrating else (self.input, self.weight)

    @property
    def backward_quantizers(self) -> tuple[Quantizer, Quantizer, Quantizer]:
        """What dx and dw are computed with: of x, w and dy."""
        if self.calibrating or self.backward == "high_precision":
            return HIGH_PRECISION, HIGH_PRECISION, HIGH_PRECISION
        return self.input, self.weight, self.grad_output if self.backward == "quantized" else HIGH_PRECISION
