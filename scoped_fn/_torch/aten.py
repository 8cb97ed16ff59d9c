"""ATen graphs: what their nodes are, and other operations in place of some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
VIEW_OPS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.transpose.int, aten.t.default, aten.permute.default, aten.expand.default, aten.select.int,
)  # fmt: skip
CAST_OPS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default, aten.clone.default)
CHECK_ERRORS = torch.ops.aten._linalg_check_errors.default


def is_higher_order(target: Any) -> bool:
    """Returns whether a node's target runs a nested graph, such as a checkpoint region."""
    return isinstance(target, HigherOrderOperator)


def operator_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Returns the arguments of an ATen call by name, defaults included."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return dict(node.kwargs)
    values = {argument.name: argument.default_value for argument in schema.arguments}
    values |= {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)}
    return values | dict(node.kwargs)


def live_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph without what nobody uses. Edits it."""
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def functional_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Returns an ATen graph without dead code and without operations that write to their arguments. Edits `gm`."""
    gm = live_graph(gm)
    if any(_writes(node.target) for node in gm.graph.nodes):
        pure = torch.func.functionalize(lambda *tensors: gm(*tensors))
        gm = live_graph(make_fx(pure, _allow_non_fake_inputs=True)(*example_inputs))
    return gm


def _writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def visible_mutations() -> dict[Any, Callable[..., Any]]:
    """Returns decompositions of operations that cannot be made functional as they are.

    One writes to its arguments although its schema does not say so; some have fake versions that fail when forward mode
    is on.
    """
    aten = torch.ops.aten
    in_place = {
        aten.lerp_.Tensor: aten.lerp.Tensor,
        aten.lerp_.Scalar: aten.lerp.Scalar,
        aten.addcmul_.default: aten.addcmul.default,
        aten.addcdiv_.default: aten.addcdiv.default,
    }
    made = {op: partial(_by_copy, pure) for op, pure in in_place.items()}
    return {aten.native_batch_norm.default: _native_batch_norm, **made}


def _by_copy(pure: Callable[..., Any], target: Any, *args: Any, **kwargs: Any) -> Any:
    return target.copy_(pure(target, *args, **kwargs))


def _native_batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: float) -> Any:
    aten = torch.ops.aten
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, *rest)
    return aten._native_batch_norm_legit.default(x, weight, bias, mean, var, training, *rest)


def batchable(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns an ATen graph that can be batched: without what has no batching rule in torch, or a wrong one. Edits it.

    `index_fill` of one tensor for all with a value for each index writes every value into the same tensor (2.13).
    Assertions about values, which eager cannot make under vmap either, are left out.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg):
        gm.graph.erase_node(node)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.index_fill.int_Tensor):
        node.target = _index_fill
    gm.recompile()
    return gm


def _index_fill(tensor: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    size = tensor.shape[dim] if tensor.dim() else 1
    chosen = torch.zeros(size, dtype=torch.bool, device=tensor.device).scatter(0, index.reshape(-1), True)
    shape = [size if i == dim % max(tensor.dim(), 1) else 1 for i in range(tensor.dim())]
    return torch.where(chosen.reshape(shape), value, tensor)
