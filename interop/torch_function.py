"""`from_jax`: a JAX function as a torch function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scoped_fn.interop.arrays import key_words, narrow_name, x64_enabled
from scoped_fn.interop.convert import is_array, is_tensor
from scoped_fn.interop.dtypes import name_of
from scoped_fn.interop.jax_call import JaxCall
from scoped_fn.interop.jax_node import apply
from scoped_fn.interop.jax_operator import JaxOperator
from scoped_fn.interop.pytrees import Structure, check_static, flatten, unflatten
from scoped_fn.interop.register import register_jax
from scoped_fn.interop.torch_call import Spec


def from_jax(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a JAX function as a torch function.

    It works with autograd of any order and under every transform of `torch.func`, and inside what `sf.compile`
    compiles, as one operation. Derivatives are JAX's of `f`; a gradient runs the forward again. `f` runs under
    `jax.jit`.

    Args:
        f: A JAX function of pytrees of arrays.

    Returns:
        A function of pytrees of tensors on the CPU. Numbers, strings and `None` in arguments are static, as are those
        in the result. Typed random keys are not passed: pass the uint32 words and wrap them inside `f`.

    Raises:
        TypeError: At the call: an argument is an array, a container that nobody knows, or a static value without a
            hash; with x64 off, an argument is float64 or complex128.
        OverflowError: With x64 off, an integer argument does not fit 32 bits.

    Example:
        >>> import jax.numpy as jnp
        >>> f = from_jax(lambda x, power=2: jnp.sum(x**power))
        >>> torch.func.grad(f)(torch.arange(3.0))
        tensor([0., 2., 4.])
    """
    if not callable(f):
        raise TypeError(f"Expected a function of arrays, got a {type(f).__name__}. Pass something to call.")
    register_jax()
    return TorchFunction(f)


class TorchFunction:
    """What `from_jax` returns."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self._f = f
        self._operator = JaxOperator()
        self._calls: dict[Any, tuple[JaxCall, Structure]] = {}
        # The words at the start are Dynamo's own for such code, by which `compile` knows to keep it as it is.
        reason = "Unsupported custom jvp: a JAX function has rules of its own."
        self._kept_from_dynamo = torch.compiler.disable(self._call, reason=reason)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return f"from_jax({self._f!r})"

    def __deepcopy__(self, memo: Any) -> TorchFunction:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's result as tensors."""
        if torch.compiler.is_dynamo_compiling():
            return self._kept_from_dynamo(*args, **kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        tensors, structure = flatten((args, kwargs), is_tensor, sort_keys=True)
        check_static(structure, is_array, "torch tensors, got an array of JAX or NumPy", "jax_to_torch")
        specs = tuple(map(_spec_of, tensors))
        key = (structure, specs, x64_enabled())
        if key not in self._calls:
            self._calls.setdefault(key, traced(self._f, structure, specs, self._operator))
        call, out_structure = self._calls[key]
        return unflatten(out_structure, apply(call, tensors))


def traced(
    f: Callable[..., Any], structure: Structure, specs: tuple[Spec, ...], operator: JaxOperator
) -> tuple[JaxCall, Structure]:
    """Returns a JAX function of flat arrays, and the structure of its result."""
    import jax
    import jax.numpy as jnp

    seen: list[Structure] = []

    def run(*arrays: Any) -> tuple[Any, ...]:
        args, kwargs = unflatten(structure, arrays)
        results, out_structure = flatten(f(*args, **kwargs), is_array)
        seen[:] = [out_structure]
        return tuple(key_words(jnp.asarray(result)) for result in results)

    like: Any = jax.ShapeDtypeStruct
    shapes = jax.eval_shape(run, *(like(spec.shape, jnp.dtype(spec.array_dtype)) for spec in specs))
    outputs = tuple(Spec(shape.shape, name_of(shape.dtype), name_of(shape.dtype)) for shape in shapes)
    return JaxCall(run, specs, outputs, x64_enabled(), operator), seen[0]


def _spec_of(tensor: torch.Tensor) -> Spec:
    name = name_of(tensor.dtype)
    return Spec(tuple(int(size) for size in tensor.shape), name, narrow_name(name))
