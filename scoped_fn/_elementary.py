"""Normalizations and attention from elementary operations, wherever something is derived.

Torch's forward-mode rules of the fused normalizations take the saved statistics for constants, so derivatives of
tangents come out wrong in silence (2.13: reverse over forward, third order, and the Hessian of a batch norm in training
mode). Its fused attention for CPUs has no rule for forward mode, second derivatives or batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from scoped_fn._torch.aten import is_higher_order
from scoped_fn._torch.dual import forward_mode_active
from scoped_fn._trace import NotDerivableError

Optional = torch.Tensor | None
# Tangents that no transform made pass by these in silence.
WITHOUT_TANGENTS: Final = ("cond", "map_impl", "scan", "while_loop")


class ElementaryAttention(TorchFunctionMode):
    """Runs attention by its definition."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_higher_order(function):
            return _higher_order(self, function, args, kwargs or {})
        return self.definition(function)(*args, **(kwargs or {}))

    def definition(self, function: Any) -> Callable[..., Any]:
        """Returns what takes a function's place."""
        if function is F.multi_head_attention_forward:
            return _multi_head_attention()
        return attention if function is F.scaled_dot_product_attention else function


class Elementary(ElementaryAttention):
    """Runs attention, and layer, batch and instance norms, by their definitions."""

    def definition(self, function: Any) -> Callable[..., Any]:
        """Returns what takes a function's place."""
        norms: dict[Any, Callable[..., Any]] = {
            F.layer_norm: layer_norm,
            torch.layer_norm: _layer_norm,
            F.batch_norm: batch_norm,
            torch.batch_norm: _batch_norm,
            F.instance_norm: instance_norm,
            torch.instance_norm: _instance_norm,
        }
        return norms.get(function) or super().definition(function)


def _multi_head_attention() -> Callable[..., Any]:
    """Returns torch's function with the attention that it calls replaced; a mode does not see calls inside it."""
    original: Any = F.multi_head_attention_forward
    names = {**vars(F), "scaled_dot_product_attention": attention, "has_torch_function": lambda _: False}
    return FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Optional = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Returns `torch.nn.functional.scaled_dot_product_attention`; a row with everything masked gives zeros."""
    if dropout_p > 0.0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return attention_with(
        lambda weights: weights, query, key, value, attn_mask, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def attention_with(
    drop: Callable[[torch.Tensor], torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: Optional = None, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Returns attention by its definition; `drop` acts on the weights after the softmax."""
    query, key, value = (_as_autocast_does(tensor) for tensor in (query, key, value))
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    wide = _wide(query)
    scores = (wide @ _wide(key).transpose(-2, -1)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    if attn_mask is None:
        return (drop(torch.softmax(scores, -1)) @ _wide(value)).to(query.dtype)
    nothing = (scores == -math.inf).all(-1, keepdim=True)  # the softmax of such a row is NaN, and so is its derivative
    weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    return (drop(weights) @ _wide(value)).to(query.dtype)


def layer_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: Optional = None, bias: Optional = None,
    eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """Returns `torch.nn.functional.layer_norm`: zero mean and unit variance over the last dimensions."""
    dims = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    made = _normalized(_wide(x), dims, eps)[0]
    return _scaled(made, weight, bias, made.dim() - len(normalized_shape), len(normalized_shape)).to(x.dtype)


def batch_norm(
    x: torch.Tensor, running_mean: Optional, running_var: Optional, weight: Optional = None,
    bias: Optional = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """Returns `torch.nn.functional.batch_norm`; in training mode it changes the running statistics in place."""
    dims = (0, *range(2, x.dim()))
    wide = _wide(x)
    if training:
        count = x.numel() // x.shape[1]
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
        made, mean, var = _normalized(wide, dims, eps)
        for running, now, scale in ((running_mean, mean, 1.0), (running_var, var, count / max(count - 1, 1))):
            if running is not None:
                now = now.detach().reshape(-1) * scale
                running.copy_((running * (1 - momentum) + now * momentum).to(running.dtype))
    else:
        shape = _channel_shape(x)
        mean, var = running_mean.to(wide.dtype).reshape(shape), running_var.to(wide.dtype).reshape(shape)  # type: ignore[union-attr]
        made = (wide - mean) * torch.rsqrt(var + eps)
    return _scaled(made, weight, bias, 1, 1).to(x.dtype)


def instance_norm(
    x: torch.Tensor, running_mean: Optional = None, running_var: Optional = None, weight: Optional = None,
    bias: Optional = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """Returns `torch.nn.functional.instance_norm`, by its definition where it has no running statistics."""
    if running_mean is not None or not use_input_stats:
        return F.instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    made = _normalized(_wide(x), tuple(range(2, x.dim())), eps)[0]
    return _scaled(made, weight, bias, 1, 1).to(x.dtype)


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: Optional = None, bias: Optional = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:  # fmt: skip
    return layer_norm(x, shape, weight, bias, eps)


def _batch_norm(
    x: torch.Tensor, weight: Optional, bias: Optional, running_mean: Optional, running_var: Optional,
    training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    return batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm(
    x: torch.Tensor, weight: Optional, bias: Optional, running_mean: Optional, running_var: Optional,
    use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    return instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _higher_order(mode: ElementaryAttention, function: Any, args: Any, kwargs: Any) -> Any:
    """Runs `torch.cond` or a loop; where torch has no rule of a choice for a transform, the branch itself runs."""
    name, missing = function.name(), "forward-mode"
    if not (forward_mode_active() and name in WITHOUT_TANGENTS):
        try:
            return function(*args, **kwargs)
        except KeyError as error:
            if type(error.args[0]).__name__ != "TransformType":
                raise
            missing = error.args[0].name
    if function is not torch.ops.higher_order.cond:
        raise NotDerivableError(f"torch has no {missing} rule of {name}")
    chosen, if_true, if_false, operands = args
    with mode:  # torch has left it, and what is in the branch needs it
        return (if_true if bool(chosen) else if_false)(*operands)


def _as_autocast_does(x: torch.Tensor) -> torch.Tensor:
    device = x.device.type
    return (
        x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) and x.dtype is torch.float32 else x
    )


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


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


def _channel_shape(x: torch.Tensor) -> tuple[int, ...]:
    return (1, -1, *(1,) * (x.dim() - 2))
