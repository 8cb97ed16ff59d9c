"""A pure function of flat tensors with known shapes, and the functions derived from it: JAX asks for these.

Tangents, gradients and batches are `torch.func`'s, so of a compiled function they are compiled too. A gradient runs the
forward again: nothing is kept between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]
Mask = tuple[bool, ...]


@dataclass(frozen=True)
class Spec:
    """What a tensor looks like.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype in torch.
        array_dtype: The name of its dtype in JAX: the same, but for integers of 64 bits while x64 is off.
        fixed: Whether it is part of a state, which nothing is differentiated by, as in torch.
    """

    shape: tuple[int, ...]
    dtype: str
    array_dtype: str
    fixed: bool = False

    @property
    def inexact(self) -> bool:
        """Whether it has floating point or complex numbers."""
        return "float" in self.dtype or "complex" in self.dtype

    @property
    def differentiable(self) -> bool:
        """Whether it has a derivative."""
        return self.inexact and not self.fixed

    def example(self, integer: int) -> torch.Tensor:
        """Returns values to try a function with: ones, identity matrices, and for integers the given one."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self.inexact:
            return torch.full(self.shape, integer, dtype=dtype)
        if len(self.shape) > 1 and self.shape[-1] == self.shape[-2]:
            return torch.eye(self.shape[-1]).expand(self.shape).to(dtype)
        return torch.ones(self.shape).to(dtype)


class Derivable:
    """What functions are derived from, and keeps them.

    Attributes:
        derived: What was derived from it so far.
    """

    derived: dict[Hashable, Any]

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns what was made for the key, the same at every call: JAX compares functions by identity."""
        if key not in self.derived:
            self.derived.setdefault(key, make())  # another thread may have been faster
        return self.derived[key]


@dataclass(frozen=True, eq=False)
class TorchCall(Derivable):
    """A pure function of flat tensors; compares by identity.

    Attributes:
        run: Takes tensors like `inputs`, gives tensors like `outputs`.
        inputs: What it takes.
        outputs: What it gives.
        owned: Whether it may be given memory of its own only, since it might write into what it is given.
        records: Whether its results say more where a gradient is wanted: the amaxes of FP8.
        transposed: For a function that is linear in its last inputs: (how many these are; which outputs have a
            cotangent -> the function (other inputs, these cotangents) -> cotangents of the linear inputs).
        derived: What was derived from it so far.
    """

    run: Callable[[Tensors], Tensors]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    owned: bool = True
    records: bool = False
    transposed: tuple[int, Callable[[Mask], TorchCall]] | None = None
    derived: dict[Hashable, Any] = field(default_factory=dict)

    def recorded(self, wanted: Mask) -> TorchCall:
        """Returns the same function as it is where gradients of the wanted inputs are to come."""
        return self.kept(("recorded", wanted), lambda: _recorded(self, wanted))  # type: ignore[no-any-return]

    def tangent(self, wanted: Mask, used: Mask) -> TorchCall:
        """Returns (inputs, tangents of the wanted ones) -> tangents of the used outputs."""
        return self.kept(("tangent", wanted, used), lambda: _tangent(self, wanted, used))  # type: ignore[no-any-return]

    def pulled(self, wanted: Mask, used: Mask) -> TorchCall:
        """Returns (inputs, cotangents of the used outputs) -> cotangents of the wanted inputs."""
        return self.kept(("pulled", wanted, used), lambda: _pulled(self, wanted, used))  # type: ignore[no-any-return]

    def batched(self, dims: tuple[int | None, ...], size: int) -> TorchCall:
        """Returns the function of inputs with a batch dimension; outputs have it in front."""
        return self.kept(("batched", dims, size), lambda: _batched(self, dims, size))  # type: ignore[no-any-return]


def chosen(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """Returns the values where the mask is true."""
    return [value for value, there in zip(values, mask, strict=True) if there]


def _recorded(call: TorchCall, wanted: Mask) -> TorchCall:
    def run(tensors: Tensors) -> Tensors:
        of, active = _active(call, tensors, wanted, (True,) * len(call.outputs))
        used = tuple(spec.differentiable for spec in call.outputs)

        def both(*active: torch.Tensor) -> tuple[Any, Any]:
            every = of(*active)
            return tuple(chosen(every, used)), every

        found: Any = torch.func.vjp(both, *active, has_aux=True)
        return list(found[2])

    return replace(call, run=run, records=False, derived={})


def _tangent(call: TorchCall, wanted: Mask, used: Mask) -> TorchCall:
    count = len(call.inputs)

    def run(tensors: Tensors) -> Tensors:
        of, active = _active(call, tensors[:count], wanted, used)
        found: Any = torch.func.jvp(of, tuple(active), tuple(tensors[count:]))
        return list(found[1])

    return TorchCall(
        run,
        (*call.inputs, *chosen(call.inputs, wanted)),
        tuple(chosen(call.outputs, used)),
        call.owned,
        transposed=(sum(wanted), lambda inner: call.pulled(wanted, _spread(used, inner))),
    )


def _pulled(call: TorchCall, wanted: Mask, used: Mask) -> TorchCall:
    count = len(call.inputs)

    def run(tensors: Tensors) -> Tensors:
        of, active = _active(call, tensors[:count], wanted, used)
        pull: Any = torch.func.vjp(of, *active)[1]
        # torch pairs a cotangent with the conjugate of a tangent, JAX with the tangent itself.
        return [grad.conj() for grad in pull(tuple(cotangent.conj() for cotangent in tensors[count:]))]

    return TorchCall(
        run,
        (*call.inputs, *chosen(call.outputs, used)),
        tuple(chosen(call.inputs, wanted)),
        call.owned,
        transposed=(sum(used), lambda inner: call.tangent(_spread(wanted, inner), used)),
    )


def _batched(call: TorchCall, dims: tuple[int | None, ...], size: int) -> TorchCall:
    def run(tensors: Tensors) -> Tensors:
        over: Any = torch.func.vmap(lambda *row: tuple(call.run(row)), dims, randomness="same")
        return list(over(*tensors))

    inputs = tuple(batched_spec(spec, dim, size) for spec, dim in zip(call.inputs, dims, strict=True))
    outputs = tuple(batched_spec(spec, 0, size) for spec in call.outputs)
    if call.transposed is None:
        return TorchCall(run, inputs, outputs, call.owned, call.records)
    count, transposed = call.transposed

    def transposed_of_batched(used: Mask) -> TorchCall:
        return transposed(used).batched((*dims[:-count], *(0,) * sum(used)), size)

    return TorchCall(run, inputs, outputs, call.owned, transposed=(count, transposed_of_batched))


def _active(call: TorchCall, tensors: Tensors, wanted: Mask, used: Mask) -> tuple[Callable[..., Any], list[Any]]:
    """Returns the function of the wanted inputs alone that gives the used outputs, and these inputs."""

    def of(*active: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(active)
        full = [next(rest) if there else tensor for tensor, there in zip(tensors, wanted, strict=True)]
        return tuple(chosen(call.run(full), used))

    return of, chosen(tensors, wanted)


def _spread(mask: Mask, inner: Mask) -> Mask:
    """Returns the mask with its true places replaced by the inner mask's."""
    rest = iter(inner)
    return tuple(there and next(rest) for there in mask)


def batched_spec(spec: Spec, dim: int | None, size: int) -> Spec:
    """Returns what a tensor looks like with a batch dimension; `None` is none."""
    if dim is None:
        return spec
    return replace(spec, shape=(*spec.shape[:dim], size, *spec.shape[dim:]))
