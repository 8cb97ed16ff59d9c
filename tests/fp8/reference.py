"""FP8 training by swapped linear layers in plain eager torch: what compiled functions are compared with, bit for bit.

It knows nothing of scopes, states or graphs: amaxes and scales live in dictionaries, and only the kernels are shared.
Codes with one scale are transposed by a view, as on any CPU: a matmul of a copy may add up in another order.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from scoped_fn.kernels import (
    Quantized,
    quantize,
    quantize_blocks,
    quantize_current,
    quantize_mx,
    scaled_mm,
    update_scales,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROLES = ("input", "weight", "grad_output")


class Delayed:
    """The scale and the amaxes of one tensor of one layer: row 0 is staged, the newest past step is last."""

    def __init__(self, dtype: torch.dtype, length: int) -> None:
        self.dtype, self.history, self.scale = dtype, torch.zeros(length), torch.ones(())

    def quantized(self, x: Tensor) -> Quantized:
        codes = quantize(x, self.scale, self.dtype)
        self.history[0] = torch.maximum(self.history[0], codes.amax)
        return codes

    def fold(self, algorithm: str, margin: int) -> None:
        largest = torch.finfo(self.dtype).max
        history, scale = update_scales(
            self.history[:, None], self.scale[None], fp8_max=largest, algorithm=algorithm, margin=margin
        )
        self.history, self.scale = history[:, 0], scale[0]

    def described(self) -> dict[str, Any]:
        past = self.history[1:].flip(0).tolist()
        staged = self.history[0].item()
        return {"history": [staged, *past] if staged else [*past, 0.0], "scale": self.scale.item()}


def by_current_scale(role: str, x: Tensor) -> Quantized:
    return quantize_current(x, E5M2 if role == "grad_output" else E4M3)


def by_blocks(role: str, x: Tensor) -> Quantized:
    return quantize_blocks(x, E4M3, block_rows=128 if role == "weight" else 1, transpose=True)


def by_mx(role: str, x: Tensor) -> Quantized:
    return quantize_mx(x, E4M3, transpose=True)


STATELESS: dict[str, Callable[[str, Tensor], Quantized]] = {
    "current": by_current_scale,
    "block": by_blocks,
    "mx": by_mx,
}


class Product(torch.autograd.Function):
    """x @ w.T + b of quantized x and w; `quantizer(role, tensor)` is the layer's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, quantizer: Callable[..., Quantized]) -> Tensor:
        ctx.x, ctx.w, ctx.quantizer = quantizer("input", x), quantizer("weight", w), quantizer
        return scaled_mm(ctx.x, ctx.w.mT, bias=b, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        codes = ctx.quantizer("grad_output", dy)
        dx = scaled_mm(codes, ctx.w, out_dtype=dy.dtype) if need_x else None
        dw = scaled_mm(codes.mT, ctx.x, out_dtype=dy.dtype) if need_w else None
        return dx, dw, dy.reshape(-1, dy.shape[-1]).sum(0) if need_b else None, None


class Reference:
    """A copy of a model whose linear layers multiply in FP8."""

    def __init__(
        self,
        model: nn.Module,
        kind: str = "delayed",
        *,
        length: int = 4,
        algorithm: str = "max",
        margin: int = 0,
        skip: Iterable[str] = (),
    ) -> None:
        self.model, self.kind = copy.deepcopy(model), kind
        self.length, self.algorithm, self.margin = length, algorithm, margin
        self.sites: dict[str, dict[str, Delayed]] = {}
        for name, layer in self.model.named_modules():
            if isinstance(layer, nn.Linear) and name not in tuple(skip):
                layer.forward = functools.partial(self._product, name, layer)

    def _product(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        if self.kind == "delayed" and name not in self.sites:
            self.sites[name] = {role: Delayed(E5M2 if role == "grad_output" else E4M3, self.length) for role in ROLES}
        return Product.apply(x, layer.weight, layer.bias, functools.partial(self._quantized, name))

    def _quantized(self, name: str, role: str, x: Tensor) -> Quantized:
        x = x.detach()
        return self.sites[name][role].quantized(x) if self.kind == "delayed" else STATELESS[self.kind](role, x)

    def end_step(self) -> None:
        """Closes a step: the scales of the next one."""
        for roles in self.sites.values():
            for column in roles.values():
                column.fold(self.algorithm, self.margin)

    def describe(self) -> dict[str, dict[str, dict[str, Any]]]:
        """As `sf.describe_fp8` gives it."""
        return {name: {role: one.described() for role, one in roles.items()} for name, roles in self.sites.items()}

    def step(self, *batch: Any, rate: float = 0.05) -> Tensor:
        """One step of plain gradient descent; the model gives the loss."""
        self.model.zero_grad()
        loss: Tensor = self.model(*batch)
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.copy_(parameter - rate * parameter.grad)
        self.end_step()
        return loss.detach()
