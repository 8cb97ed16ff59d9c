"""`to_jax`: a pure torch function as a JAX function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from scoped_fn.interop.arrays import key_words, narrow_name, narrowed, unmasked, x64_enabled
from scoped_fn.interop.convert import is_array, is_tensor
from scoped_fn.interop.dtypes import name_of
from scoped_fn.interop.jax_primitive import bind, tangent_class
from scoped_fn.interop.pytrees import Structure, check_static, flatten, places_in_states, states_of, unflatten
from scoped_fn.interop.register import register_jax
from scoped_fn.interop.torch_call import Spec, Tensors, TorchCall
from scoped_fn.state import tree_equal


def to_jax(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a pure torch function as a JAX function.

    It works under the transforms of JAX, in any nesting: `jit`, `grad`, `vjp`, `jvp`, `hessian`, `vmap`,
    `checkpoint`, `lax.scan`, `cond`, `while_loop`; not under `jax.linear_transpose`. Derivatives are `torch.func`'s of
    `fn`, so those of a compiled function run compiled; a gradient runs the forward again. A batch is one call of
    `torch.func.vmap`.

    Args:
        fn: A pure function: a `CompiledFn`, `value_and_grad` of one, or any torch function whose result depends on
            its arguments alone. It is called with tensors on the CPU, once with ones, identity matrices and integer
            zeros for each new kind of arguments, to learn the shapes of its outputs.

    Returns:
        A function of pytrees of JAX arrays. NumPy arrays count as arrays and a typed random key as its uint32 words;
        numbers, strings and `None` in arguments are static, as are those in the result. A `CompilerState` may be
        argument and result.

    Raises:
        TypeError: `fn` is no function, or compiled with `rng="torch"`. At the call: an argument is a tensor, a module,
            a container that nobody knows, or a static value without a hash; with x64 off, an argument or result is
            float64 or complex128; `fn` draws from torch's generator, or is a module that changes its buffers as it is
            tried (of modules that it closes over nobody knows).
        jax.errors.JaxRuntimeError: At the call, as a ValueError outside of `jax.jit`: `fn` failed, or its results
            differ in shape, dtype or structure from when it was traced. The text holds the error.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> f = to_jax(lambda x, power=2: (x**power).sum())
        >>> jax.jit(jax.grad(f))(jnp.arange(3.0))
        Array([0., 2., 4.], dtype=float32)
    """
    if not callable(fn):
        raise TypeError(f"Expected a function of tensors, got a {type(fn).__name__}. Pass something to call.")
    _check_pure(fn)
    register_jax()
    return JaxFunction(fn)


class JaxFunction:
    """What `to_jax` returns."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._kind = tangent_class()
        self._calls: dict[Any, tuple[TorchCall, Structure]] = {}

    def __repr__(self) -> str:
        return f"to_jax({self._fn!r})"

    def __deepcopy__(self, memo: Any) -> JaxFunction:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's result as arrays."""
        arrays, structure = flatten((args, kwargs), is_array, sort_keys=True)
        check_static(structure, is_tensor, "JAX arrays, got a torch.Tensor", "torch_to_jax")
        arrays = [_as_array(array) for array in arrays]
        key = (structure, tuple((array.shape, str(array.dtype)) for array in arrays), x64_enabled())
        if key not in self._calls:
            self._calls.setdefault(key, traced(self._fn, structure, _specs_of(arrays, structure)))
        call, out_structure = self._calls[key]
        return unflatten(out_structure, bind(self._kind, call, arrays))


def traced(fn: Callable[..., Any], structure: Structure, specs: list[Spec]) -> tuple[TorchCall, Structure]:
    """Returns a function of flat tensors, and the structure of its result."""

    def flat(tensors: Tensors) -> tuple[list[torch.Tensor], Structure]:
        args, kwargs = unflatten(structure, tensors)
        return flatten(fn(*args, **kwargs), is_tensor)

    with _own_buffers_kept(fn):
        results, expected = _tried(flat, specs)
    outputs = [(tuple(result.shape), name_of(result.dtype)) for result in results]

    def run(tensors: Tensors) -> Tensors:
        found, now = flat(tensors)
        if now != expected:
            raise ValueError(
                f"Expected a result like the one when the function was traced, {expected}, got {now}. "
                "Return containers and numbers that depend on shapes and static arguments alone."
            )
        return found

    fixed = places_in_states(expected, len(results), every=True)
    made = tuple(Spec(shape, dtype, narrow_name(dtype), i in fixed) for i, (shape, dtype) in enumerate(outputs))
    # What is compiled is refused if it writes into an argument, so it may see memory that is not its own.
    records = any(state.fp8 for state in states_of(structure, range(len(specs))))
    return TorchCall(run, tuple(specs), made, owned=_compiled(fn) is None, records=records), expected


def _tried(flat: Callable[[Tensors], Any], specs: list[Spec]) -> Any:
    """Returns what a function gives for example values; with ones for integers where zeros are refused."""
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            try:
                return flat([spec.example(0) for spec in specs])
            except Exception:  # noqa: BLE001 - whatever a function says to a division by zero
                return flat([spec.example(1) for spec in specs])
    except Exception as error:
        error.add_note("to_jax called the function with ones and identity matrices to learn its shapes.")
        raise
    finally:
        moved = not torch.equal(before, torch.get_rng_state())
        torch.set_rng_state(before)
        if moved:
            raise TypeError(
                "Expected a function that draws no numbers from torch's generator, since its gradient would draw "
                "others, got one that does. Compile it with sf.compile, or draw with sf.random and a key."
            )


@contextmanager
def _own_buffers_kept(fn: Any) -> Iterator[None]:
    """Raises `TypeError` if a module changes its own buffers meanwhile, and puts them back."""
    module = getattr(fn, "__self__", fn)
    held = dict(module.named_buffers()) if isinstance(module, torch.nn.Module) else {}
    before = {name: buffer.detach().clone() for name, buffer in held.items()}
    try:
        yield
    finally:
        now = dict(module.named_buffers()) if held else {}
        changed = [name for name, own in held.items() if now.get(name) is not own or not _same(own, before[name])]
        for name in changed:
            path, _, leaf = name.rpartition(".")
            held[name].detach().copy_(before[name])
            setattr(module.get_submodule(path), leaf, held[name])
    if changed:
        raise TypeError(
            f"Expected a function that changes nothing, got the module {type(module).__name__}, which changes its "
            f"buffers ({', '.join(changed)}). Compile it with sf.compile: then they are part of the state."
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two buffers have the same numbers; of kinds that cannot be compared it is believed."""
    try:
        if one.is_quantized or one.layout != torch.strided or one.is_meta:
            return True
        return tree_equal(one, other)
    except (RuntimeError, NotImplementedError):
        return True


def _compiled(fn: Any) -> Any:
    """Returns the compiled function that a function is, or is a whole step of; None if it is neither."""
    import scoped_fn as sf

    inner = getattr(fn, "fn", None) if type(fn).__module__.split(".")[0] == sf.__name__ else None
    return next((each for each in (fn, inner) if isinstance(each, sf.CompiledFn)), None)


def _check_pure(fn: Any) -> None:
    """Raises `TypeError` for a function that would draw one mask in its forward, and another one in its backward."""
    compiled = _compiled(fn)
    if compiled is not None and compiled.captured.rng == "torch":
        raise TypeError(
            f"Expected a function that depends on its arguments alone, got {compiled.name} with rng='torch'. "
            "Compile it without rng='torch'."
        )


def _as_array(array: Any) -> Any:
    """Returns an array of a dtype that torch has; the words of a typed random key."""
    import jax

    return key_words(array) if isinstance(array, jax.Array) else narrowed(unmasked(array))


def _specs_of(arrays: list[Any], structure: Structure) -> list[Spec]:
    names = [name_of(array.dtype) for array in arrays]
    count = len(arrays)
    wide = set() if x64_enabled() else places_in_states(structure, count, every=False)
    fixed = places_in_states(structure, count, every=True)
    return [
        Spec(tuple(array.shape), "int64" if name == "int32" and i in wide else name, name, i in fixed)
        for i, (array, name) in enumerate(zip(arrays, names, strict=True))
    ]
