"""A `JaxCall` as one operation of torch: a node of autograd over an operator that tracers take whole.

The node has the rules for gradients, tangents and batches, each again such an operation, so any order works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scoped_fn.interop.jax_call import JaxCall
from scoped_fn.interop.torch_call import Mask, Spec, chosen

Tensors = tuple[torch.Tensor, ...]


def apply(call: JaxCall, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Returns the results of a call for tensors of any kind: plain, recorded, transformed, traced."""
    return JaxNode.apply(call, *tensors) if call.outputs else ()  # type: ignore[no-untyped-call]


class JaxNode(torch.autograd.Function):
    """The node; its first argument is the call."""

    @staticmethod
    def forward(call: JaxCall, *tensors: torch.Tensor) -> Tensors:
        """Returns the results."""
        return tuple(call.operator(call, list(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        """Keeps the inputs: a gradient runs the function again."""
        ctx.call = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.mark_non_differentiable(
            *(out for out, spec in zip(output, ctx.call.outputs, strict=True) if not spec.differentiable)
        )

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        """Returns a gradient for each input that wants one."""
        call: JaxCall = ctx.call
        wanted = _differentiable(call.inputs, ctx.needs_input_grad[1:])
        used = _differentiable(call.outputs, [cotangent is not None for cotangent in cotangents])
        if not any(wanted) or not any(used):
            return None, *(None for _ in wanted)
        found = iter(apply(call.pulled(wanted, used), (*ctx.saved_tensors, *chosen(cotangents, used))))
        return None, *(next(found) if there else None for there in wanted)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> Any:
        """Returns a tangent of each differentiable result."""
        call: JaxCall = ctx.call
        wanted = _differentiable(call.inputs, [tangent is not None for tangent in tangents])
        used = _differentiable(call.outputs, [True] * len(call.outputs))
        if not any(wanted) or not any(used):
            return tuple(None for _ in used)
        found = iter(apply(call.tangent(wanted, used), (*ctx.saved_tensors, *chosen(tangents, wanted))))
        return tuple(next(found) if there else None for there in used)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: JaxCall, *tensors: torch.Tensor) -> tuple[Tensors, Any]:
        """Returns the results for a batch."""
        results = apply(call.batched(tuple(in_dims[1:]), info.batch_size), tensors)
        return results, (0,) * len(results)


def _differentiable(specs: tuple[Spec, ...], mask: Sequence[bool]) -> Mask:
    return tuple(spec.differentiable and there for spec, there in zip(specs, mask, strict=True))
