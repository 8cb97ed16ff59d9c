"""The operator of torch in which a JAX function runs: tracers take it whole, and it has a rule for shapes."""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from scoped_fn.interop.arrays import array_to_tensor, narrowed, plain
from scoped_fn.interop.dtypes import as_numpy

if TYPE_CHECKING:
    from scoped_fn.interop.jax_call import JaxCall

NAMESPACE = "scoped_fn_interop"


class JaxOperator:
    """One operator for a function and all that is derived from it: `(tensors, number of a call) -> tensors`.

    It works for a call as long as this call lives. torch's registry is out of sight of Python's garbage collector, so
    the operator holds its calls weakly, and stays registered, an empty shell, when the function is gone: calling one
    that was taken away would read freed memory.

    Attributes:
        overload: The operator in torch.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._calls: weakref.WeakValueDictionary[int, JaxCall] = weakref.WeakValueDictionary()
        self.overload = _defined(self._calls)

    def __call__(self, call: JaxCall, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the results of a call."""
        return self.overload(tensors, call.kept("number", lambda: self._number(call)))  # type: ignore[no-any-return]

    def _number(self, call: JaxCall) -> int:
        number = next(self._numbers)
        self._calls[number] = call
        return number


def _defined(calls: weakref.WeakValueDictionary[int, JaxCall]) -> Any:
    name = f"jax_{uuid.uuid4().hex}"
    library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

    def compute(tensors: list[torch.Tensor], call: int, _kept: Any = library) -> list[torch.Tensor]:
        return _run(_living(calls, call), tensors)

    def shapes(tensors: Sequence[torch.Tensor], call: int) -> list[torch.Tensor]:
        outputs, device = _living(calls, call).outputs, "meta" if any(t.is_meta for t in tensors) else "cpu"
        return [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in outputs]

    def batched(info: Any, in_dims: Any, tensors: list[torch.Tensor], call: int) -> Any:
        of_batch = _living(calls, call).batched(tuple(in_dims[0]), info.batch_size)
        results = of_batch.operator(of_batch, tensors)
        return results, [0] * len(results)

    library.define(f"{name}(Tensor[] tensors, int call) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    library.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=library)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", batched, lib=library)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", _no_derivative, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _living(calls: weakref.WeakValueDictionary[int, JaxCall], number: int) -> JaxCall:
    call = calls.get(number)
    if call is None:
        raise RuntimeError(
            "Expected the function that from_jax returned to be alive where compiled code calls it, got one that is "
            "gone. Keep a reference to it."
        )
    return call


def _no_derivative(ctx: Any, *cotangents: Any) -> Any:
    raise RuntimeError(
        "Expected a derivative by the rules of the function that from_jax returned, got one of the operator inside. "
        "Compile the function that calls it anew."
    )


def _run(call: JaxCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    import jax

    function = call.kept("jitted", lambda: jax.jit(call.run))
    # The values are at hand, also where JAX is tracing a function around this call.
    with jax.ensure_compile_time_eval(), jax.enable_x64(call.x64):
        # JAX reads the memory of the tensors during the call alone: results are copied before it ends.
        results = function(*(narrowed(as_numpy(plain(tensor).contiguous())) for tensor in tensors))
        return [array_to_tensor(result) for result in results]
