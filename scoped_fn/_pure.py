"""`Pure`: a flat function of tensors, from which batched versions and derivatives are derived, each compiled once.

A derived function is the original one run under a transform, so rules of custom Functions, `detach` and `no_grad` hold
at every order. It is traced and compiled when it is first called with plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from scoped_fn._autograd_graph import once_only
from scoped_fn._backends import Backend, Code, GraphRole
from scoped_fn._errors import RandomOpError
from scoped_fn._graph import Graph
from scoped_fn._one_graph import separate_outputs
from scoped_fn._runtime import Memo, launch_code
from scoped_fn._specs import TensorSpec, laid_out
from scoped_fn._torch.config import patched
from scoped_fn._torch.dynamo import compile_lock
from scoped_fn._torch.flat import Flat, differentiable_flat, jvp_flat, vjp_flat, vmap_flat
from scoped_fn._trace import NotDerivableError, or_zeros, probe, trace
from scoped_fn.stages.compile_graph import compile_graph
from scoped_fn.state import FrozenDict

Made = TypeVar("Made")
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Shop:
    """What all functions derived from one have in common.

    Attributes:
        name: The compiled function's name.
        backend: What turns graphs into code.
        torch_rng: Whether random ops draw from torch's generators.
        memo: Where compilations and calls are counted.
        overrides: Settings of torch that compilations run under.
    """

    name: str
    backend: Backend
    torch_rng: bool
    memo: Memo
    overrides: FrozenDict[str, Any] = field(default_factory=FrozenDict)


class Pure:
    """A flat function with arguments of fixed specs.

    Attributes:
        run: The function; any transform may act on it.
        specs: Spec of each argument.
        outputs: Spec of each result.
        buffers: Indices of arguments that the model may change in place; a batched version may want them batched.
        shop: What it shares with the functions it was derived from.
        dual: Whether it uses forward mode.
        by_autograd: The same for plain tensors by plain autograd, where there is one.
    """

    def __init__(
        self, run: Flat, specs: Sequence[TensorSpec], shop: Shop, buffers: Sequence[int] = (), *, dual: bool = False
    ) -> None:
        self.run, self.specs, self.shop, self.buffers, self.dual = run, tuple(specs), shop, tuple(buffers), dual
        self.by_autograd: Flat | None = None
        self._made: dict[Key, Any] = {}

    def once(self, key: Key, make: Callable[[], Made]) -> Made:
        """Returns what was made under a key; a derivation that failed fails again, at once."""
        if key not in self._made:
            with compile_lock:
                if key not in self._made:
                    try:
                        self._made[key] = make()
                    except NotDerivableError as error:
                        self._made[key] = error
        made = self._made[key]
        if isinstance(made, NotDerivableError):
            raise made
        return made  # type: ignore[no-any-return]

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Spec of each result."""
        return self.once(("outputs",), lambda: tuple(map(laid_out, probe(self.run, self.specs, dual=self.dual))))

    def launch(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs compiled code on plain tensors."""
        code = self.once(("code",), self._compile)
        return launch_code(self.shop.memo, code, self.fitted(tensors))

    def fitted(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns plain tensors in the memory layout that compiled code takes."""
        return [spec.fit(tensor) for spec, tensor in zip(self.specs, tensors, strict=True)]

    def vmapped(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Pure, tuple[bool, ...]]:
        """Returns the function that runs once for each index of the batch, and which of its results have one.

        Args:
            batch: How many, which arguments, and how random ops behave.
            tensors: Its arguments, whose memory layouts it is compiled for.
        """
        strides = tuple([tensor.stride() for tensor in tensors])
        found = self._made.get(("strides", batch, strides))
        if found is None:  # layouts that are alike when gaps and overlaps are left out share one
            specs = tuple(map(laid_out, tensors))
            found = self.once(("vmap", batch, specs), lambda: self._vmapped(batch, specs))
            self._made["strides", batch, strides] = found
        return found

    def _vmapped(self, batch: Batch, specs: Sequence[TensorSpec]) -> tuple[Pure, tuple[bool, ...]]:
        try:
            return self._vmapped_with(batch, specs, batch.batched)
        except NotDerivableError:
            forced = tuple(b or i in self.buffers for i, b in enumerate(batch.batched))
            if forced == batch.batched:
                raise
        return self._vmapped_with(batch, specs, forced)  # a shared buffer cannot be changed by each index

    def _vmapped_with(
        self, batch: Batch, specs: Sequence[TensorSpec], taken: tuple[bool, ...]
    ) -> tuple[Pure, tuple[bool, ...]]:
        def parts(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, bool]]:
            spread = [
                t.expand(batch.size, *t.shape) if takes and not has else t
                for t, takes, has in zip(tensors, taken, batch.batched, strict=True)
            ]
            # A function that draws from a key has one for each index already, where that is what the level says.
            randomness = batch.randomness if self.shop.torch_rng else "same"
            found = vmap_flat(self.run, batch.size, taken, randomness, spread)
            given = batch.given or tuple(has for _, has in found)
            return [
                (out.expand(batch.size, *out.shape) if wants and not has else out, wants)
                for (out, has), wants in zip(found, given, strict=True)
            ]

        mask = tuple(batched for _, batched in probe(parts, specs, dual=self.dual))
        made = self._derived(lambda *tensors: [out for out, _ in parts(*tensors)], specs)
        return made, mask

    def jvped(self, mask: tuple[bool, ...]) -> tuple[Pure, tuple[bool, ...]]:
        """Returns the function (arguments, tangents where `mask` says so) -> (results, tangents), and who has one."""
        return self.once(("jvp", mask), lambda: self._jvped(mask))

    def _jvped(self, mask: tuple[bool, ...]) -> tuple[Pure, tuple[bool, ...]]:
        count = len(self.specs)

        def parts(*tensors: torch.Tensor) -> Any:
            tangents = iter(tensors[count:])
            return jvp_flat(self.run, tensors[:count], [next(tangents) if has else None for has in mask])

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            found = parts(*tensors)
            return [*(out for out, _ in found), *(tangent for _, tangent in found if tangent is not None)]

        specs = [*self.specs, *(spec for spec, has in zip(self.specs, mask, strict=True) if has)]
        out_mask = tuple(tangent is not None for _, tangent in probe(parts, specs, dual=True))
        return Pure(run, specs, self.shop, self.buffers, dual=True), out_mask

    def differentiable(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the indices of the results that carry a gradient of one of the `wanted` arguments."""

        def find() -> tuple[int, ...]:
            found = probe(lambda *tensors: differentiable_flat(self.run, tensors, wanted), self.specs, dual=self.dual)
            return tuple(i for i, carries in enumerate(found) if carries)

        return self.once(("differentiable", wanted), find)

    def reached(self, wanted: tuple[int, ...], used: tuple[int, ...]) -> tuple[int, ...]:
        """Returns those of the `wanted` arguments that the `used` results depend on."""
        return self.once(("reached", wanted, used), lambda: self._reached(wanted, used))

    def _reached(self, wanted: tuple[int, ...], used: tuple[int, ...]) -> tuple[int, ...]:
        specs = [*self.specs, *(self.outputs[i] for i in used)]
        found = probe(lambda *tensors: self._pull(wanted, used, tensors), specs, dual=self.dual)
        return tuple(i for i, grad in zip(wanted, found, strict=True) if grad is not None)

    def vjp(self, wanted: tuple[int, ...], used: tuple[int, ...]) -> Pure:
        """Returns the function (arguments, cotangents of the `used` results) -> gradients of the `wanted` arguments.

        Raises:
            RandomOpError: The function draws random numbers, which would be others than those of the forward.
        """
        self._refuse_to_draw_again()
        return self.once(("vjp", wanted, used), lambda: self._vjp(wanted, used))

    def _refuse_to_draw_again(self) -> None:
        if self.shop.torch_rng:
            raise RandomOpError(
                f"Expected a first derivative of {self.shop.name}, which draws from torch's generators, got a request "
                "for more, which would draw other numbers. Compile the function that takes the derivative, or turn "
                "the random operations off."
            )

    def _vjp(self, wanted: tuple[int, ...], used: tuple[int, ...]) -> Pure:
        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return or_zeros(self._pull(wanted, used, tensors), tensors, wanted)

        specs = [*self.specs, *(self.outputs[i] for i in used)]
        made = self._derived(run, specs).with_outputs(tuple(self.specs[i].dense() for i in wanted))
        made.by_autograd = partial(self._pull_by_autograd, wanted, used)
        return made

    def _pull_by_autograd(
        self, wanted: tuple[int, ...], used: tuple[int, ...], *tensors: torch.Tensor
    ) -> list[torch.Tensor]:
        """Returns what `vjp` gives for plain tensors, by plain autograd, which takes what torch.func refuses."""
        count, kept = len(self.specs), torch.is_grad_enabled()
        with torch.enable_grad():
            own = [tensor if tensor.requires_grad else tensor.detach().requires_grad_(i in wanted)
                   for i, tensor in enumerate(tensors[:count])]  # fmt: skip
            outs = (self.by_autograd or self.run)(*own)
            pairs = [(outs[i], cotangent) for i, cotangent in zip(used, tensors[count:], strict=True)]
            pairs = [(out, cotangent) for out, cotangent in pairs if out.requires_grad]
            if not pairs or once_only(out for out, _ in pairs):
                raise RuntimeError(
                    f"Expected gradients of {self.shop.name} that can be differentiated, got some that cannot, such as "
                    "those of a backward marked with @once_differentiable. Take one derivative."
                )
            ends, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(ends, [own[i] for i in wanted], given, create_graph=True, allow_unused=True)
        grads = or_zeros(found, own, wanted)
        return grads if kept else [grad.detach() for grad in grads]

    def with_outputs(self, outputs: tuple[TensorSpec, ...]) -> Pure:
        """Returns this function, whose results' specs are known without a probe."""
        self._made["outputs",] = outputs
        return self

    def _derived(self, run: Flat, specs: Sequence[TensorSpec]) -> Pure:
        return Pure(run, specs, self.shop, self.buffers, dual=self.dual)

    def _pull(self, wanted: tuple[int, ...], used: tuple[int, ...], tensors: tuple[torch.Tensor, ...]) -> Any:
        count = len(self.specs)
        return vjp_flat(self.run, tensors[:count], wanted, dict(zip(used, tensors[count:], strict=True)))[1]

    def _compile(self) -> Code:
        shop = self.shop
        with patched(shop.overrides):
            gm = trace(self.run, self.specs, shop.backend, torch_rng=shop.torch_rng, dual=self.dual)
        separate_outputs(gm)
        graph = Graph(
            gm, tuple(f"in_{i}" for i in range(len(self.specs))), tuple(f"out_{i}" for i in range(_count(gm)))
        )
        role = GraphRole(_count(gm), is_inference=True, torch_rng=shop.torch_rng, whole=True, lowered_for=shop.backend)
        shop.memo.compiled_graphs += 1
        return compile_graph(graph, shop.backend, role, overrides=shop.overrides).code


class Batch(NamedTuple):
    """One vmap level.

    Attributes:
        size: The batch size.
        batched: For each argument, whether its first dimension is the batch.
        randomness: "error", "same" or "different", as `torch.vmap` has it.
        given: For each result, whether it is to have a batch; None: those have one that depend on the batch.
    """

    size: int
    batched: tuple[bool, ...]
    randomness: str
    given: tuple[bool, ...] | None = None


def _count(gm: torch.fx.GraphModule) -> int:
    return len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
