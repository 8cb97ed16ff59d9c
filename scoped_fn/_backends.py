"""Backends: how a graph becomes code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from scoped_fn._errors import SpecError
from scoped_fn._fp8.shared_casts import share_casts
from scoped_fn._graph import copy_graph, fake_inputs, output_values
from scoped_fn._torch.inductor import (
    compile_with_inductor,
    decompose,
    inductor_decompositions,
    inductor_options,
    run_joint_passes,
)
from scoped_fn.kernels import EXPANSIONS, FUSIBLE

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Code = Callable[[list[Any]], Sequence[Any]]
Backend = str | Compiler
Strides = Sequence[tuple[int, ...] | None]


@dataclass(frozen=True)
class GraphRole:
    """What a graph is for, which a backend may use.

    Attributes:
        num_visible: How many of the first outputs a user sees; only these must keep eager's strides.
        is_backward: A backward graph.
        is_inference: A graph of which no gradient is taken.
        torch_rng: Random ops draw from torch's generators.
        whole: The graph did not come out of a partition, so the backend has not improved it yet.
        lowered_for: The backend whose decompositions the graph was traced with.
    """

    num_visible: int
    is_backward: bool = False
    is_inference: bool = False
    torch_rng: bool = False
    whole: bool = False
    lowered_for: Backend = "eager"


def check_backend(backend: Any) -> None:
    """Raises `SpecError` if there is no such backend."""
    if backend not in ("inductor", "eager") and (isinstance(backend, str) or not callable(backend)):
        raise SpecError(
            f"Expected backend 'inductor', 'eager' or a function (gm, example_inputs) -> callable, got {backend!r}. "
            "Pass one of them."
        )


def decompositions(backend: Backend) -> Any:
    """Returns which ATen operations are rewritten into simpler ones while a graph for this backend is traced."""
    return {**EXPANSIONS, **(inductor_decompositions() if backend == "inductor" else {})}


def tracing_options(backend: Backend, *, torch_rng: bool) -> AbstractContextManager[None]:
    """Returns the context in which graphs for this backend are traced."""
    return inductor_options(torch_rng=torch_rng) if backend == "inductor" else nullcontext()


def improve(backend: Backend, gm: torch.fx.GraphModule, *, torch_rng: bool) -> torch.fx.GraphModule:
    """Returns the graph after the backend's own passes on whole graphs. Edits `gm`."""
    if backend != "inductor":
        return gm
    with inductor_options(torch_rng=torch_rng):
        return run_joint_passes(gm, fake_inputs(gm))


def make_code(
    backend: Backend, gm: torch.fx.GraphModule, role: GraphRole, input_strides: Strides = ()
) -> tuple[Code, Strides]:
    """Returns code that runs the graph on a list of tensors, and the strides of what it returns, where it chose them.

    Args:
        backend: A backend.
        gm: A flat ATen graph; it is not edited.
        role: What the graph is for.
        input_strides: Strides of the first inputs, where they differ from those that the graph was traced with.
    """
    check_backend(backend)
    gm = copy_graph(gm)
    fusible = any(node.target in FUSIBLE for node in gm.graph.nodes)
    if backend == "inductor" and (fusible or role.lowered_for != "inductor"):
        gm = share_casts(decompose(gm, fake_inputs(gm), FUSIBLE))
    examples = _restrided(fake_inputs(gm), input_strides)
    if not any(isinstance(value, torch.fx.Node) for value in output_values(gm)):
        return _positional(gm.forward), ()  # nothing to compute: Inductor refuses such a graph
    if backend == "inductor":
        gm = improve(backend, gm, torch_rng=role.torch_rng) if role.whole else gm
        with inductor_options(torch_rng=role.torch_rng):
            return compile_with_inductor(
                gm,
                examples,
                num_visible=role.num_visible,
                is_backward=role.is_backward,
                is_inference=role.is_inference,
            )
    if backend == "eager":
        return _positional(gm.forward), ()
    return _positional(backend(gm, examples)), ()  # type: ignore[operator]


def _restrided(fakes: list[Any], strides: Strides) -> list[Any]:
    """Returns the fake inputs with the strides that they will really have."""
    known = [*strides, *[None] * (len(fakes) - len(strides))]
    return [
        fake if stride is None or fake.stride() == stride else fake.as_strided(fake.shape, stride)
        for fake, stride in zip(fakes, known, strict=True)
    ]


def _positional(function: Callable[..., Any]) -> Code:
    return lambda tensors: function(*tensors)
