"""Operators that every tracer and transform of torch takes as one opaque node: this room's door to private torch.

`torch.library.custom_op` with `register_autograd` fails under `torch.func.grad` and is silently zero under `jvp`. What
works in eager, `torch.func`, `make_fx`, AOTAutograd, `torch.compile` and `torch.export` is an operator of a library
with an Autograd kernel of its own that takes off one level at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._C import _DisableAutocast as disable_autocast
from torch._C import _is_fwd_grad_enabled as is_forward_mode_enabled
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction


@dataclass(frozen=True)
class Derivative:
    """How an operator is differentiated.

    Attributes:
        backward: (arguments, which of them need a gradient, cotangent of each result or None) -> a gradient or None
            for each argument.
        jvp: (arguments, tangents or None of all arguments) -> tangent of the result, or of each result.
        plain: (which arguments need a gradient, whether a transform may ask for more) -> which of several results
            carry none.
    """

    backward: Callable[..., tuple[Tensor | None, ...]]
    jvp: Callable[[tuple[Any, ...], tuple[Tensor | None, ...]], Tensor | tuple[Tensor | None, ...] | None]
    plain: Callable[[tuple[bool, ...], bool], tuple[int, ...]] = lambda needs, transformed: ()


def define_op(
    library: torch.library.Library,
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    derivative: Derivative | None,
    spread: Mapping[int, Callable[[Tensor, int], Tensor]] = MappingProxyType({}),
) -> OpOverload[..., Any]:
    """Defines an operator whose tensors all lead with a batch dimension, and returns it.

    Args:
        library: Where it is defined.
        schema: ``name(Tensor x, ...) -> ...``.
        cpu: Computes the results on a CPU.
        cuda: Computes them on a GPU.
        fake: Computes their shapes and dtypes only.
        derivative: How it is differentiated; None refuses to be, since a silent zero would be wrong.
        spread: Arguments that are not repeated like the others where they are not mapped: (tensor, size of the mapped
            dimension) -> the tensor with that dimension in front.

    Returns:
        The operator. Under vmap the mapped dimension is folded into the batch dimension.
    """
    name = schema.split("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    op: OpOverload[..., Any] = getattr(getattr(torch.ops, library.ns), name).default
    kernels = {
        "CPU": _without_autocast(cpu),
        "CUDA": _without_autocast(cuda),
        "Autograd": _autograd_kernel(op, derivative),
    }
    for key, kernel in kernels.items():
        library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    torch.library.register_vmap(f"{library.ns}::{name}", _fold_batch(op, spread), lib=library)
    return op


def compile_cpp(types: Sequence[str], source: str) -> Callable[..., None] | None:
    """Returns the function `kernel` of a C++ source, compiled with Inductor's flags once for a machine.

    Args:
        types: The types of its arguments: pointers, for which tensors are passed, and "int64_t".
        source: Standard C++ with one function, `extern "C" void kernel(...)`.

    Returns:
        The function; None where there is no compiler.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache  # takes a second to import

    try:
        return CppPythonBindingsCodeCache.load_pybinding(list(types), source)  # type: ignore[no-any-return]
    except (RuntimeError, OSError, ImportError):
        return None


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*arguments: Any) -> Any:
        with disable_autocast():  # the caller's would round the float32 sums inside
            return function(*arguments)

    return kernel


def _autograd_kernel(op: OpOverload[..., Any], derivative: Derivative | None) -> Callable[..., Any]:
    rules = derivative or _refusal(str(op))

    class OneLevel(SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, modes: tuple[bool, bool], *arguments: Any) -> Any:
            ctx.set_materialize_grads(False)  # a zero gradient of FP8 data is none at all
            if derivative is not None:
                _save(ctx, arguments)
            # torch has both switched off here, but an outer level records if the caller does.
            with torch.set_grad_enabled(modes[0]), forward_ad._set_fwd_grad_enabled(modes[1]):
                results = below(*arguments)
            if isinstance(results, tuple):
                ctx.mark_non_differentiable(*(results[i] for i in plain(ctx, results)))
            return results

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            return None, *rules.backward(_saved(ctx), ctx.needs_input_grad[1:], *cotangents)

        @staticmethod
        def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
            # The rule is linear in the tangents and must be differentiable by an outer forward mode, not by this one.
            primals = tuple(_primal(value) for value in _saved(ctx))
            with forward_ad._set_fwd_grad_enabled(True):
                return rules.jvp(primals, tangents)

        @staticmethod
        def _compiled_autograd_key(ctx: Any) -> tuple[Any, ...]:
            return (ctx._autograd_function_id,)

    def plain(ctx: Any, results: tuple[Tensor, ...]) -> Sequence[int]:
        if derivative is None:
            return [i for i, result in enumerate(results) if result.dtype == torch.float32]
        return derivative.plain(ctx.needs_input_grad[1:], _is_transformed())

    def below(*arguments: Any) -> Any:
        with below_autograd():  # on to the next level, or to the backend
            return op(*arguments)

    def kernel(*arguments: Any) -> Any:
        if not _is_recorded(arguments):
            return below(*arguments)  # saves a quarter of a small call
        with enable_single_level_autograd_function():
            return OneLevel.apply((torch.is_grad_enabled(), is_forward_mode_enabled()), *arguments)  # type: ignore[attr-defined]

    return kernel


def _is_recorded(arguments: tuple[Any, ...]) -> bool:
    """Whether a derivative may be wanted. Tracers open forward mode in C++, where only the stack of levels tells."""
    if _is_transformed():
        return True
    return any(isinstance(value, Tensor) and value.requires_grad for value in arguments)


def _is_transformed() -> bool:
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def _primal(value: Any) -> Any:
    return forward_ad.unpack_dual(value, level=0).primal if isinstance(value, Tensor) else value  # type: ignore[no-untyped-call]


def _refusal(name: str) -> Derivative:
    def refuse(*_: object) -> NoReturn:
        raise RuntimeError(
            f"Expected no derivative through {name}, whose results are codes, statistics or bits, got one. "
            "Call it on a detached tensor, inside a torch.autograd.Function with a rule of its own (docs/kernels.md)."
        )

    return Derivative(backward=refuse, jvp=refuse)


def _save(ctx: Any, arguments: tuple[Any, ...]) -> None:
    tensors = [value if isinstance(value, Tensor) else None for value in arguments]
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.others = tuple(None if isinstance(value, Tensor) else value for value in arguments)


def _saved(ctx: Any) -> tuple[Any, ...]:
    """Returns the arguments of the call; none where nothing was saved."""
    tensors = ctx.saved_tensors
    return tuple(
        other if tensor is None else tensor for tensor, other in zip(tensors, getattr(ctx, "others", ()), strict=True)
    )


def _fold_batch(op: OpOverload[..., Any], spread: Mapping[int, Callable[[Tensor, int], Tensor]]) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        own = {i: make(arguments[i], info.batch_size) for i, make in spread.items() if in_dims[i] is None}
        arguments = tuple(own.get(i, value) for i, value in enumerate(arguments))
        in_dims = [0 if i in own else dim for i, dim in enumerate(in_dims)]
        pairs = zip(arguments, in_dims, strict=True)
        batched = [
            _batched(value, dim, info.batch_size) if isinstance(value, Tensor) else value for value, dim in pairs
        ]
        sizes = next(value.shape[:2] for value in batched if isinstance(value, Tensor))
        results = op(*(value.flatten(0, 1) if isinstance(value, Tensor) else value for value in batched))
        if isinstance(results, Tensor):
            return results.reshape(*sizes, *results.shape[1:]), 0
        return tuple(result.reshape(*sizes, *result.shape[1:]) for result in results), (0,) * len(results)

    return rule


def _batched(value: Tensor, dim: int | None, size: int) -> Tensor:
    """Returns a tensor with its mapped dimension in front of its batch dimension; what is not mapped is repeated."""
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
