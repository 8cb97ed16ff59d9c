"""A `TorchCall` as a JAX function with rules of its own for batches, tangents and gradients.

The value and its batches are plain JAX (a callback under `custom_vmap` and `custom_jvp`), so `jax.jit` calls them by
its fastest way. A tangent is an operation that JAX can also transpose into a gradient, which `custom_jvp` alone does
not give for a callback: an instance of a class of `jax.experimental.hijax`. It is gone once a gradient is traced. No
registry of JAX grows, and none of ours is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scoped_fn.interop.host import callback_of
from scoped_fn.interop.torch_call import Mask, Spec, TorchCall, chosen


def bind(kind: type, call: TorchCall, arrays: Any) -> tuple[Any, ...]:
    """Returns the results of a call for arrays of JAX, with or without values."""
    import jax

    if not call.outputs:
        return ()
    function, jitted = call.kept(("function", kind), lambda: _function(kind, call))
    # Values at hand: nothing to transform, and jit spares JAX the tracing of each call.
    now = not any(isinstance(array, jax.core.Tracer) for array in arrays)
    return tuple((jitted if now else function)(*arrays))


def tangent_class() -> type:
    """Returns the class of operations that are linear in their last inputs; made from a `TorchCall`.

    Raises:
        ImportError: JAX is too old.
    """
    import jax

    try:
        from jax.experimental.hijax import VJPHiPrimitive
    except ImportError as error:
        raise ImportError(f"Expected jax 0.10 or later, got {jax.__version__}. Install a newer one.") from error
    rules = {
        "__init__": _init,
        "expand": lambda self, *arrays: bind(type(self), self.call, arrays),
        "jvp": lambda self, arrays, tangents: (self(*arrays), _tangents(type(self), self.call, arrays, tangents)),
        "vjp_fwd": lambda self, given, *arrays: (self(*arrays), (arrays, _marks(given))),
        "vjp_bwd": _vjp_backward,
        "lin": lambda self, given, *arrays: (self(*arrays), arrays),
        "linearized": lambda self, arrays, *tangents: _tangents(type(self), self.call, arrays, tangents),
        "transpose": _transpose,
        "batch": _batch,
    }
    return type("TorchTangent", (VJPHiPrimitive,), rules)


def _function(kind: type, call: TorchCall) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the JAX function of a call, and the same under jit."""
    import jax
    from jax.custom_batching import custom_vmap
    from jax.experimental.buffer_callback import buffer_callback

    def jvp(arrays: Any, tangents: Any) -> tuple[Any, Any]:
        wanted = _differentiable(call.inputs, tuple(not _is_zero(tangent) for tangent in tangents))
        value = call.recorded(wanted) if call.records and any(wanted) else call
        return bind(kind, value, arrays), _tangents(kind, call, arrays, tangents)

    def batched(size: int, given: Any, *arrays: Any) -> tuple[Any, Any]:
        dims = tuple(0 if there else None for there in given)
        made = call.batched(dims, size) if any(given) else call
        return bind(kind, made, arrays), (any(given),) * len(call.outputs)

    def with_jvp(function: Any) -> Any:
        made = jax.custom_jvp(function)
        made.defjvp(jvp, symbolic_zeros=True)
        return made

    # Twice: in second derivatives of a scan JAX drops the outer rule, taking what is inside for plain JAX.
    # Else XLA leaves a callback without any values out, and with it the check that there are none.
    empty = all(0 in spec.shape for spec in call.outputs)
    shapes = tuple(map(_struct, call.outputs))
    value = custom_vmap(with_jvp(buffer_callback(callback_of(call), shapes, has_side_effect=empty)))
    value.def_vmap(batched)
    function = with_jvp(value)
    return function, jax.jit(function)


def _init(self: Any, call: TorchCall) -> None:
    self.in_avals = tuple(map(_aval, call.inputs))
    self.out_aval = tuple(map(_aval, call.outputs))
    self.params = {"call": call}
    super(type(self), self).__init__()


def _aval(spec: Spec) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.core.ShapedArray(spec.shape, jnp.dtype(spec.array_dtype))


def _struct(spec: Spec) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.array_dtype))  # type: ignore[no-untyped-call]


def _vjp_backward(self: Any, kept: Any, cotangents: Any, *sums: Any) -> None:
    arrays, marks = kept
    wanted = _differentiable(self.call.inputs, tuple(mark is not None for mark in marks))
    used = _differentiable(self.call.outputs, tuple(not _is_zero(cotangent) for cotangent in cotangents))
    if any(wanted) and any(used):
        pulled = self.call.pulled(wanted, used)
        _add(chosen(sums, wanted), bind(type(self), pulled, (*arrays, *chosen(cotangents, used))))


def _tangents(kind: type, call: TorchCall, arrays: Any, tangents: Any) -> tuple[Any, ...]:
    wanted = _differentiable(call.inputs, tuple(not _is_zero(tangent) for tangent in tangents))
    used = _differentiable(call.outputs, (True,) * len(call.outputs))
    made: Any = ()
    if any(wanted) and any(used):
        made = kind(call.tangent(wanted, used))(*arrays, *chosen(tangents, wanted))
    rest = iter(made)
    return tuple(
        next(rest) if there and made else _zero_tangent(spec) for spec, there in zip(call.outputs, used, strict=True)
    )


def _zero_tangent(spec: Spec) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    if spec.inexact:
        return jnp.zeros(spec.shape, jnp.dtype(spec.array_dtype))
    return np.zeros(spec.shape, jax.dtypes.float0)


def _transpose(self: Any, cotangents: Any, *arguments: Any) -> None:
    call: TorchCall = self.call
    if call.transposed is None:
        raise NotImplementedError("Expected a function that is linear, got one that is not. Take jax.vjp of it.")
    count, transposed = call.transposed
    used = tuple(not _is_zero(cotangent) for cotangent in cotangents)
    if any(used):
        given = (*arguments[:-count], *chosen(cotangents, used))
        _add(arguments[-count:], bind(type(self), transposed(used), given))


def _batch(self: Any, axis: Any, arrays: Any, dims: Any) -> tuple[Any, Any]:
    import jax.numpy as jnp

    call: TorchCall = self.call
    if all(dim is None for dim in dims):
        return self(*arrays), (None,) * len(call.outputs)
    first_linear = len(arrays) - (call.transposed[0] if call.transposed else 0)
    arrays, dims = list(arrays), list(dims)
    for i in range(first_linear, len(arrays)):  # JAX sums what it transposes over the batch
        if dims[i] is None:
            arrays[i], dims[i] = jnp.broadcast_to(arrays[i], (axis.size, *arrays[i].shape)), 0
        else:
            arrays[i], dims[i] = jnp.moveaxis(arrays[i], dims[i], 0), 0
    results = type(self)(call.batched(tuple(dims), axis.size))(*arrays)
    return results, (0,) * len(results)


def _marks(given: Any) -> tuple[Any, ...]:
    """Returns which are true as a tree without leaves: what JAX keeps for a backward is arrays and structure."""
    return tuple(() if there else None for there in given)


def _is_zero(value: Any) -> bool:
    import jax
    from jax.custom_derivatives import SymbolicZero
    from jax.experimental.hijax import Zero

    return isinstance(value, (Zero, SymbolicZero)) or getattr(value, "dtype", None) == jax.dtypes.float0


def _differentiable(specs: tuple[Spec, ...], mask: Mask) -> Mask:
    return tuple(spec.differentiable and there for spec, there in zip(specs, mask, strict=True))


def _add(sums: Any, values: Any) -> None:
    for total, value in zip(sums, values, strict=True):
        total.accum(value)
