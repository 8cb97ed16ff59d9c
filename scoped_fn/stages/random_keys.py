"""The part of `capture` that makes random operations draw from the key of the state."""

from __future__ import annotations

from dataclasses import replace

import torch

from scoped_fn._errors import RandomOpError
from scoped_fn._graph import Graph, user_line
from scoped_fn._random.graph import KEY, with_keys
from scoped_fn._random.rules import RECURRENT, keyed
from scoped_fn._specs import TensorSpec
from scoped_fn.stages.captured import Captured


def draw_from_keys(captured: Captured, device: torch.device) -> Captured:
    """Returns the graph with a key as its last input, and the next key as its last output, if it draws.

    Args:
        captured: A captured model. Its structure may say that it takes a key in any case, as other calls of its kind.
        device: Where the key is.
    """
    gm, drawn = with_keys(captured.graph.gm)
    if not drawn and not captured.keyed:
        return captured
    outputs = (KEY,) if drawn else ()
    graph = Graph(gm, (*captured.graph.inputs, KEY), (*captured.graph.outputs, *outputs))
    return replace(
        captured,
        graph=graph,
        specs=(*captured.specs, TensorSpec(torch.Size((2,)), (1,), torch.int32, device, False)),
        in_structure=replace(captured.in_structure, keyed=True),
        new_buffers=(*captured.new_buffers, *outputs),
    )


def refuse_lost_draws(captured: Captured) -> Captured:
    """Returns the captured model; raises if torch's traces would lose its dropout in silence."""
    for node in captured.graph.gm.graph.nodes:
        found = keyed(node.target, node.args, node.kwargs) if node.op == "call_function" else None
        if found is not None and found.operation in RECURRENT:
            raise RandomOpError(
                f"Expected {captured.source.name} to have no dropout between the layers of a recurrent network with "
                f"rng='torch', got some in {found.operation}{user_line(node)}. Compile with rng='key'."
            )
    return captured
