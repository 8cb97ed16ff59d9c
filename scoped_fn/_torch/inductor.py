"""What Inductor does with ATen graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import _recursive_joint_graph_passes as joint_graph_passes
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from scoped_fn._torch.tensors import fake_mode_of


def inductor_decompositions() -> Any:
    """Returns the decompositions that Inductor wants to be traced with."""
    return select_decomp_table()


def decompose(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], more: Mapping[Any, Callable[..., Any]]
) -> torch.fx.GraphModule:
    """Returns a flat ATen graph traced again with Inductor's decompositions, and more."""
    table = {**select_decomp_table(), **more}
    with fake_mode_of(example_inputs), torch.no_grad():
        traced = make_fx(lambda *tensors: gm(*tensors), decomposition_table=table, _allow_non_fake_inputs=True)
        result: torch.fx.GraphModule = traced(*example_inputs)
    return result


@contextmanager
def inductor_options(*, torch_rng: bool) -> Iterator[None]:
    """Sets per-call Inductor options. `torch_rng`: random ops draw from torch's own generators, as in eager."""
    with inductor_config.patch(fallback_random=torch_rng):
        yield


def run_joint_passes(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Returns the graph after Inductor's joint passes (pattern matching, constant folding). Edits `gm`."""
    mode = fake_mode_of(example_inputs)
    device = next((t.device for t in example_inputs if isinstance(t, torch.Tensor)), torch.device("cpu"))
    with mode, tracing(TracingContext(mode)):
        result: torch.fx.GraphModule = joint_graph_passes(gm, input_device=device)
    return result


def compile_with_inductor(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, num_visible: int, is_backward: bool, is_inference: bool
) -> tuple[Callable[[list[Any]], Sequence[Any]], list[tuple[int, ...] | None]]:
    """Returns code that takes a list of tensors, which it clears, and returns tensors; and the strides of these.

    Args:
        gm: A flat ATen graph; it is edited.
        example_inputs: Its fake inputs.
        num_visible: The first outputs keep the strides they have in eager; the others may have any.
        is_backward: Whether the graph is a backward.
        is_inference: Whether no gradient is ever taken of it.
    """
    gm.graph.output_node().meta["user_visible_output_idxs"] = list(range(num_visible))
    context = TracingContext(fake_mode_of(example_inputs))
    with tracing(context), TracingContext.report_output_strides() as reported:
        code: Any = compile_fx_inner(gm, list(example_inputs), is_backward=is_backward, is_inference=is_inference)
    strides = [tuple(int(s) for s in stride) if stride is not None else None for stride in reported or []]
    return code, strides
