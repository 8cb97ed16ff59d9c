"""A `JaxCall` as one operation of torch: a node of autograd over an operator that tracers take whole.

The node has the rules for gradients, tangents and batches, each again such an operation, so any order works. The
operator has a rule for shapes, and works as long as its `JaxCall` lives.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from scoped_fn.interop.arrays import array_to_tensor, narrowed, plain
from scoped_fn.interop.dtypes import as_numpy
from scoped_fn.interop.jax_call import JaxCall
from scoped_fn.interop.torch_call import Mask, Spec, chosen

NAMESPACE = "scoped_fn_interop"
Tensors = tuple[torch.Tensor, ...]


def apply(call: JaxCall, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Returns the results of a call for tensors of any kind: plain, recorded, transformed, traced."""
    return JaxNode.apply(call, *tensors) if call.outputs else ()  # type: ignore[no-untyped-call]


class JaxNode(torch.autograd.Function):
    """The node; its first argument is the call."""

    @staticmethod
    def forward(call: JaxCall, *tensors: torch.Tensor) -> Tensors:
        """Returns the results."""
        return tuple(_operator(call)(list(tensors)))

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


def _operator(call: JaxCall) -> Any:
    """Returns the operator of a call, which takes and gives a list."""
    return call.kept("operator", lambda: _make_operator(call))


def _make_operator(call: JaxCall) -> Any:
    # torch's registry is out of sight of Python's garbage collector, so the operator may not hold the call. The
    # operator itself stays registered, an empty shell: calling one that is gone would read freed memory.
    get, name = _Weak(call), f"jax_{uuid.uuid4().hex}"
    library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

    def compute(tensors: list[torch.Tensor], _kept: Any = library) -> list[torch.Tensor]:
        return _run(get(), tensors)

    def shapes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in get().outputs]

    def batched(info: Any, in_dims: Any, tensors: Sequence[torch.Tensor]) -> Any:
        results = _operator(get().batched(tuple(in_dims[0]), info.batch_size))(tensors)
        return results, [0] * len(results)

    library.define(f"{name}(Tensor[] tensors) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    library.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=library)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", batched, lib=library)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", _no_derivative, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _no_derivative(ctx: Any, *cotangents: Any) -> Any:
    raise RuntimeError(
        "Expected a derivative by the rules of the function that from_jax returned, got one of the operator inside. "
        "Compile the function that calls it anew."
    )


class _Weak:
    """A call that lives as long as the function that `from_jax` returned."""

    def __init__(self, call: JaxCall) -> None:
        self._reference = weakref.ref(call)

    def __call__(self) -> JaxCall:
        call = self._reference()
        if call is None:
            raise RuntimeError(
                "Expected the function that from_jax returned to be alive where compiled code calls it, got one that "
                "is gone. Keep a reference to it."
            )
        return call


def _run(call: JaxCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    import jax

    function = call.kept("jitted", lambda: jax.jit(call.run))
    # The values are at hand, also where JAX is tracing a function around this call.
    with jax.ensure_compile_time_eval(), jax.enable_x64(call.x64):
        # JAX reads the memory of the tensors during the call alone: results are copied before it ends.
        results = function(*(narrowed(as_numpy(plain(tensor).contiguous())) for tensor in tensors))
        return [array_to_tensor(result) for result in results]


def _differentiable(specs: tuple[Spec, ...], mask: Sequence[bool]) -> Mask:
    return tuple(spec.differentiable and there for spec, there in zip(specs, mask, strict=True))
