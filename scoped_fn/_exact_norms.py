"""Normalizations from elementary operations, wherever derivatives are derived.

Torch's forward-mode rules of the fused ones take the saved statistics for constants, so derivatives of tangents come out
wrong in silence (2.13: reverse over forward, third order, and the Hessian of a batch norm in training mode).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

Optional = torch.Tensor | None


class ExactNorms(TorchFunctionMode):
    """Runs layer, batch and instance norms by their definitions."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        exact = {
            F.layer_norm: layer_norm,
            torch.layer_norm: _layer_norm,
            F.batch_norm: batch_norm,
            torch.batch_norm: _batch_norm,
            F.instance_norm: instance_norm,
            torch.instance_norm: _instance_norm,
        }.get(function, function)
        return exact(*args, **(kwargs or {}))


def layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: Optional = None, bias: Optional = None,
    eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """Returns `torch.nn.functional.layer_norm`: zero mean and unit variance over the last dimensions."""
    dims = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    made = _normalized(_wide(input), dims, eps)[0]
    return _scaled(made, weight, bias, made.dim() - len(normalized_shape), len(normalized_shape)).to(input.dtype)


def batch_norm(
    input: torch.Tensor, running_mean: Optional, running_var: Optional, weight: Optional = None,
    bias: Optional = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """Returns `torch.nn.functional.batch_norm`; in training mode it changes the running statistics in place."""
    dims = (0, *range(2, input.dim()))
    wide = _wide(input)
    if training:
        count = input.numel() // input.shape[1]
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
        made, mean, var = _normalized(wide, dims, eps)
        for running, now, scale in ((running_mean, mean, 1.0), (running_var, var, count / max(count - 1, 1))):
            if running is not None:
                now = now.detach().reshape(-1) * scale
                running.copy_((running * (1 - momentum) + now * momentum).to(running.dtype))
    else:
        shape = _channel_shape(input)
        mean, var = running_mean.to(wide.dtype).reshape(shape), running_var.to(wide.dtype).reshape(shape)  # type: ignore[union-attr]
        made = (wide - mean) * torch.rsqrt(var + eps)
    return _scaled(made, weight, bias, 1, 1).to(input.dtype)


def instance_norm(
    input: torch.Tensor, running_mean: Optional = None, running_var: Optional = None, weight: Optional = None,
    bias: Optional = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """Returns `torch.nn.functional.instance_norm`, by its definition where it has no running statistics."""
    if running_mean is not None or not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    made = _normalized(_wide(input), tuple(range(2, input.dim())), eps)[0]
    return _scaled(made, weight, bias, 1, 1).to(input.dtype)


def _layer_norm(
    input: torch.Tensor, shape: Sequence[int], weight: Optional = None, bias: Optional = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:  # fmt: skip
    return layer_norm(input, shape, weight, bias, eps)


def _batch_norm(
    input: torch.Tensor, weight: Optional, bias: Optional, running_mean: Optional, running_var: Optional,
    training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm(
    input: torch.Tensor, weight: Optional, bias: Optional, running_mean: Optional, running_var: Optional,
    use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    return instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _wide(input: torch.Tensor) -> torch.Tensor:
    return input.float() if input.dtype in (torch.float16, torch.bfloat16) else input


def _normalized(
    wide: torch.Tensor, dims: tuple[int, ...], eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean = wide.mean(dims, keepdim=True)
    centered = wide - mean
    var = (centered * centered).mean(dims, keepdim=True)
    return centered * torch.rsqrt(var + eps), mean, var


def _scaled(made: torch.Tensor, weight: Optional, bias: Optional, first: int, count: int) -> torch.Tensor:
    """Multiplies by the weight and adds the bias, whose dimensions are the `count` ones from `first`."""
    after = (1,) * (made.dim() - first - count)
    made = made if weight is None else made * weight.to(made.dtype).reshape(*weight.shape, *after)
    return made if bias is None else made + bias.to(made.dtype).reshape(*bias.shape, *after)


def _channel_shape(input: torch.Tensor) -> tuple[int, ...]:
    return (1, -1, *(1,) * (input.dim() - 2))
