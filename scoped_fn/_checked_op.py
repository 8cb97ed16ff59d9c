"""The check of a factorization as an operation on its result, so that a pure graph keeps it.

Torch checks with an operation that returns nothing, which any removal of dead code would drop.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from scoped_fn._torch.aten import CHECK_ERRORS, live_graph


@torch.library.custom_op("scoped_fn::checked", mutates_args=())
def checked(result: torch.Tensor, info: torch.Tensor, name: str, is_matrix: bool) -> torch.Tensor:
    """Returns a copy of the result.

    Args:
        result: What a factorization or solution computed.
        info: What LAPACK says about it, int32: 0 is success.
        name: The function, for the message.
        is_matrix: Whether it is one matrix, not a batch.

    Raises:
        torch.linalg.LinAlgError: `info` tells of a failure, such as a singular matrix.
    """
    CHECK_ERRORS(info, name, is_matrix=is_matrix)
    return result.clone()


@checked.register_fake
def _(result: torch.Tensor, info: torch.Tensor, name: str, is_matrix: bool) -> torch.Tensor:
    return torch.empty_like(result)


@checked.register_vmap
def _(
    batch: Any, in_dims: Any, result: torch.Tensor, info: torch.Tensor, name: str, is_matrix: bool
) -> tuple[torch.Tensor, int | None]:
    return checked(result, info, name, is_matrix and in_dims[1] is None), in_dims[0]


def keep_checks(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph with each check as an operation on the result that it checks. Edits it."""
    for node in list(gm.graph.nodes):
        if node.target is not CHECK_ERRORS:
            continue
        info, name = node.args
        result = _result_of(info)
        if result is not None:
            with gm.graph.inserting_after(max(result, info)):
                arguments = (result, info, name, node.kwargs["is_matrix"])
                guarded = gm.graph.call_function(torch.ops.scoped_fn.checked.default, arguments)
            guarded.meta = dict(result.meta)
            result.replace_all_uses_with(guarded)
            guarded.args = arguments
        gm.graph.erase_node(node)
    return live_graph(gm)


def _result_of(info: torch.fx.Node) -> torch.fx.Node | None:
    """Returns the first result of the operation that `info` is a further result of."""
    maker = info.args[0] if info.args else None
    if not isinstance(maker, torch.fx.Node):
        return None
    found = (user for user in maker.users if user.args[1:] == (0,))
    return next(found, None)
