"""Traces of functions under transforms, apart from the caller's levels and modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.fx
from torch.utils._pytree import tree_leaves

from scoped_fn._ambient import without_autocast
from scoped_fn._autograd_graph import custom_nodes
from scoped_fn._backends import Backend, decompositions, tracing_options
from scoped_fn._checked_op import keep_checks
from scoped_fn._fp8.shared_quantizations import share_quantizations
from scoped_fn._graph import refuse_random_ops
from scoped_fn._specs import TensorSpec
from scoped_fn._torch.aten import functional_graph, visible_mutations
from scoped_fn._torch.flat import Flat, vjp_flat
from scoped_fn._torch.levels import apart
from scoped_fn._torch.tensors import fake_mode
from scoped_fn._torch.tracing import make_fx

Made = TypeVar("Made")


class NotDerivableError(Exception):
    """A function could not be traced under a transform; it has to run eager there."""


def probe(run: Callable[..., Any], specs: Sequence[TensorSpec], *, dual: bool) -> Any:
    """Runs a function on tensors without data, or, if `dual` (it uses forward mode), on examples where that fails.

    In forward mode torch may lose the device of tensors without data, or fail (pytorch #185718).

    Raises:
        NotDerivableError: It cannot be run so.
    """
    try:
        with _apart():
            try:
                with fake_mode():
                    found = run(*(spec.fake() for spec in specs))
                return _checked(found, tree_leaves(found))
            except Exception:
                if not dual:
                    raise
        with _apart():
            return _on_examples(run, specs)
    except Exception as error:
        raise NotDerivableError(str(error)) from error


def trace(
    run: Flat, specs: Sequence[TensorSpec], backend: Backend, *, torch_rng: bool, dual: bool
) -> torch.fx.GraphModule:
    """Returns the functional ATen graph of a function, lowered for the backend; `dual` as in `probe`.

    Raises:
        NotDerivableError: It cannot be traced.
        RandomOpError: It draws by itself, and not from torch's generators by name.
    """

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return list(run(*tensors))

    try:
        with tracing_options(backend, torch_rng=torch_rng):
            gm = _traced(flat, specs, backend, dual)
    except Exception as error:
        raise NotDerivableError(str(error)) from error
    if not torch_rng:
        refuse_random_ops(gm, "a function under transforms")
    return gm


def _traced(flat: Flat, specs: Sequence[TensorSpec], backend: Backend, dual: bool) -> torch.fx.GraphModule:
    try:
        with _apart():
            return _trace(flat, specs, backend)
    except Exception:
        if not dual:
            raise
    with _apart():
        seen = _on_examples(lambda *t: _functional(flat, t), specs)
        return _trace(lambda *t: seen(*t), specs, backend)


def trace_joint(
    run: Flat,
    specs: Sequence[TensorSpec],
    wanted: Sequence[int],
    tangents: Mapping[int, TensorSpec],
    backend: Backend,
    *,
    torch_rng: bool,
    dual: bool,
) -> torch.fx.GraphModule:
    """Returns the ATen graph of a function's forward and backward, of its forward alone if there are no tangents.

    Placeholders: the arguments, `primals_*`, then the cotangents, `tangents_*`. Outputs: the results, then gradients.

    Args:
        run: The function.
        specs: Spec of each argument.
        wanted: Indices of the arguments that get a gradient, zeros where the results do not depend on them.
        tangents: Specs of the cotangents, by the index of the result.
        backend: What it is lowered for.
        torch_rng: Whether random ops draw from torch's generators.
        dual: As in `probe`.
    """
    count = len(specs)

    def joint(*tensors: torch.Tensor) -> list[torch.Tensor]:
        primals, cotangents = tensors[:count], dict(zip(tangents, tensors[count:], strict=True))
        results, grads = vjp_flat(run, primals, wanted, cotangents)
        return [*results, *or_zeros(grads, primals, wanted)]

    every = [*specs, *tangents.values()]
    gm = trace(joint if tangents else run, every, backend, torch_rng=torch_rng, dual=dual)
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):  # the partition knows tangents by their names
        node.target = node.name = f"primals_{i + 1}" if i < count else f"tangents_{i - count + 1}"
    gm.recompile()
    return gm


def or_zeros(
    grads: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor], wanted: Sequence[int]
) -> list[torch.Tensor]:
    """Returns the gradients of the wanted tensors, zeros for those that are None."""
    return [torch.zeros_like(tensors[i]) if grad is None else grad for i, grad in zip(wanted, grads, strict=True)]


def _trace(run: Flat, specs: Sequence[TensorSpec], backend: Backend) -> torch.fx.GraphModule:
    table = {**visible_mutations(), **decompositions(backend)}
    with fake_mode():
        fakes = [spec.fake() for spec in specs]
        gm = make_fx(run, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
        gm = share_quantizations(functional_graph(keep_checks(gm), fakes))
    return _checked(gm, [node.meta.get("val") for node in gm.graph.nodes])


def _checked(result: Made, values: Sequence[Any]) -> Made:
    """Returns the result; raises if torch lost the device of a tensor without data."""
    for value in tree_leaves(list(values)):
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            raise NotDerivableError("a tensor without data lost its device")
    return result


def _functional(flat: Flat, tensors: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    gm = make_fx(flat, decomposition_table=visible_mutations())(*tensors)
    return functional_graph(keep_checks(gm), tensors)


def _on_examples(run: Callable[..., Made], specs: Sequence[TensorSpec]) -> Made:
    """Runs a function on example tensors, on others if it refuses the first."""
    devices = {spec.device for spec in specs if spec.device.type == "cuda"}
    with torch.random.fork_rng(devices):  # random ops must not move the caller's generators
        try:
            return run(*(spec.example() for spec in specs))
        except Exception:  # noqa: BLE001 - whatever the function says to a wrong value
            return run(*(spec.example(1) for spec in specs))


def first_rules_are_all(run: Flat, specs: Sequence[TensorSpec], wanted: Sequence[int]) -> bool:
    """Returns whether the backwards of custom Functions use no custom Functions, and may be differentiated."""

    def check(*tensors: torch.Tensor) -> bool:
        leaves = [tensor.detach().clone().requires_grad_(i in wanted) for i, tensor in enumerate(tensors)]
        outs = [out for out in run(*leaves) if out.requires_grad]
        known = custom_nodes(outs)
        grads = torch.autograd.grad(
            outs,
            [leaves[i] for i in wanted],
            [torch.ones_like(out).requires_grad_() for out in outs],
            create_graph=True,
            allow_unused=True,
        )
        return custom_nodes([grad for grad in grads if grad is not None and grad.requires_grad]) <= known

    return bool(probe(check, specs, dual=False))


@contextmanager
def _apart() -> Iterator[None]:
    """Keeps the caller's levels and modes out of a trace."""
    with apart(), torch.inference_mode(False), torch.enable_grad(), without_autocast().restored():
        yield
