"""A JAX function of flat arrays with known shapes, and the functions derived from it: torch asks for these."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from scoped_fn.interop.jax_operator import JaxOperator
from scoped_fn.interop.torch_call import Derivable, Mask, Spec, batched_spec, chosen

Arrays = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class JaxCall(Derivable):
    """A JAX function of flat arrays; compares by identity.

    Attributes:
        run: Takes arrays like `inputs`, gives arrays like `outputs`.
        inputs: What it takes.
        outputs: What it gives.
        x64: Whether JAX keeps 64 bits inside, whatever the setting is when it runs.
        operator: Where it runs.
        derived: What was derived from it so far.
    """

    run: Callable[..., Arrays]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    x64: bool
    operator: JaxOperator
    derived: dict[Hashable, Any] = field(default_factory=dict)

    def tangent(self, wanted: Mask, used: Mask) -> JaxCall:
        """Returns (inputs, tangents of the wanted ones) -> tangents of the used outputs."""
        return self.kept(("tangent", wanted, used), lambda: _tangent(self, wanted, used))  # type: ignore[no-any-return]

    def pulled(self, wanted: Mask, used: Mask) -> JaxCall:
        """Returns (inputs, cotangents of the used outputs) -> cotangents of the wanted inputs."""
        return self.kept(("pulled", wanted, used), lambda: _pulled(self, wanted, used))  # type: ignore[no-any-return]

    def batched(self, dims: tuple[int | None, ...], size: int) -> JaxCall:
        """Returns the function of inputs with a batch dimension; outputs have it in front."""
        return self.kept(("batched", dims, size), lambda: _batched(self, dims, size))  # type: ignore[no-any-return]


def _tangent(call: JaxCall, wanted: Mask, used: Mask) -> JaxCall:
    count = len(call.inputs)

    def run(*arrays: Any) -> Arrays:
        import jax

        of, active = _active(call, arrays[:count], wanted, used)
        return tuple(jax.jvp(of, tuple(active), tuple(arrays[count:]))[1])

    inputs = (*call.inputs, *chosen(call.inputs, wanted))
    return JaxCall(run, inputs, tuple(chosen(call.outputs, used)), call.x64, call.operator)


def _pulled(call: JaxCall, wanted: Mask, used: Mask) -> JaxCall:
    count = len(call.inputs)

    def run(*arrays: Any) -> Arrays:
        import jax

        of, active = _active(call, arrays[:count], wanted, used)
        pull = jax.vjp(of, *active)[1]
        # torch pairs a cotangent with the conjugate of a tangent, JAX with the tangent itself.
        return tuple(_conjugate(grad) for grad in pull(tuple(map(_conjugate, arrays[count:]))))

    inputs = (*call.inputs, *chosen(call.outputs, used))
    return JaxCall(run, inputs, tuple(chosen(call.inputs, wanted)), call.x64, call.operator)


def _batched(call: JaxCall, dims: tuple[int | None, ...], size: int) -> JaxCall:
    def run(*arrays: Any) -> Arrays:
        import jax

        return tuple(jax.vmap(call.run, dims)(*arrays))

    inputs = tuple(batched_spec(spec, dim, size) for spec, dim in zip(call.inputs, dims, strict=True))
    outputs = tuple(batched_spec(spec, 0, size) for spec in call.outputs)
    return JaxCall(run, inputs, outputs, call.x64, call.operator)


def _active(call: JaxCall, arrays: Arrays, wanted: Mask, used: Mask) -> tuple[Callable[..., Arrays], list[Any]]:
    """Returns the function of the wanted inputs alone that gives the used outputs, and these inputs."""

    def of(*active: Any) -> Arrays:
        rest = iter(active)
        full = [next(rest) if there else array for array, there in zip(arrays, wanted, strict=True)]
        return tuple(chosen(call.run(*full), used))

    return of, chosen(arrays, wanted)


def _conjugate(array: Any) -> Any:
    import jax.numpy as jnp

    return jnp.conj(array) if jnp.issubdtype(array.dtype, jnp.complexfloating) else array
