"""Delayed scaling: the next scales, from the history of amaxes."""

from __future__ import annotations

import torch
from torch import Tensor

from scoped_fn.kernels import _ops as ops
from scoped_fn.kernels._checks import check_choice, check_float32, check_number, check_same_device
from scoped_fn.kernels._formats import FLOAT32_MAX


def update_scales(
    amax_history: Tensor,
    scale: Tensor,
    *,
    fp8_max: float | Tensor,
    algorithm: str = "max",
    margin: float = 0,
) -> tuple[Tensor, Tensor]:
    """Returns the next history and scales of all sites at once; one launch on a GPU.

    Row 0 of the history is the staging row: the amax of the step that ends. In a column whose staged amax is 0 (it did
    not run) or not finite (a bad step), only the staging row is cleared. In the others the rows move up by one, the
    staged amax becomes the newest, in the last row, and

        scale = fp8_max * 2 ** -margin / amax        (to nearest, at most the largest float32)

    with amax the largest of the L newest steps, this one included, or the newest alone.

    Args:
        amax_history: (L, n) float32, at least 0; rows 1 to L - 1 from the oldest to the newest.
        scale: (n,) float32, kept where there is no usable amax.
        fp8_max: The largest finite value of each column's format, 448 (E4M3) or 57344 (E5M2): a number, or float32 ()
            or (n,).
        algorithm: "max" or "most_recent".
        margin: Powers of two to stay below the largest value.

    Returns:
        amax_history (L, n), its row 0 all zeros, and scale (n,). New tensors; no derivative.

    Raises:
        TypeError: A tensor is not float32.
        ValueError: Sizes do not fit each other, algorithm is another word, or a number is out of range.

    Example:
        >>> history = torch.tensor([[4.0], [0.0], [8.0]])
        >>> history, scale = update_scales(history, torch.ones(1), fp8_max=448.0)
        >>> history.flatten().tolist(), scale.item()
        ([0.0, 8.0, 4.0], 56.0)
    """
    if not isinstance(amax_history, Tensor) or amax_history.dim() != 2 or not amax_history.shape[0]:
        got = tuple(amax_history.shape) if isinstance(amax_history, Tensor) else type(amax_history).__name__
        raise ValueError(f"Expected amax_history of shape (L, n) with L >= 1, got {got}. One column for each tensor.")
    columns = amax_history.shape[1]
    check_float32(amax_history, "amax_history", tuple(amax_history.shape))
    check_float32(scale, "scale", (columns,))
    check_choice(algorithm, "algorithm", ("max", "most_recent"))
    check_number(margin, "margin")
    if not -127 <= margin <= 149:
        raise ValueError(f"Expected margin from -127 to 149, a power of two that float32 has, got {margin}. Use 0.")
    if not isinstance(fp8_max, Tensor):
        check_number(fp8_max, "fp8_max (where it is no tensor)")
        if not 0 < fp8_max <= FLOAT32_MAX:
            raise ValueError(f"Expected fp8_max above 0, got {fp8_max}. Pass 448 for E4M3, 57344 for E5M2.")
        fp8_max = torch.full_like(scale, fp8_max)
    fp8_max = fp8_max.expand(columns) if fp8_max.dim() == 0 else fp8_max
    check_float32(fp8_max, "fp8_max", (columns,))
    check_same_device(amax_history, scale=scale, fp8_max=fp8_max)
    history, scale = ops.update_scales(
        amax_history[None], scale[None], fp8_max[None], algorithm == "most_recent", float(margin)
    )
    return history[0], scale[0]
