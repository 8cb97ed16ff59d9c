"""Which FP8 codes the backward makes again: those of activations that are saved, or cheap to have, anyway.

A partition saves the operand of a matmul, since it is not fused into what reads it. Where what leads to it is
elementwise, and starts from tensors that the backward needs for other reasons, a cast in the backward costs less than
memory for the codes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
import torch.fx
from torch.utils.checkpoint import CheckpointPolicy

from scoped_fn._torch.aten import CAST_OPS, VIEW_OPS

Node = torch.fx.Node
# Where one kind of codes serves forward and backward.
PER_TENSOR = (torch.ops.scoped_fn.quantize.default, torch.ops.scoped_fn.quantize_current.default)


def recompute_codes(gm: torch.fx.GraphModule, num_primals: int) -> torch.fx.GraphModule:
    """Returns a joint graph in which the codes that need not be saved are marked for the partition. Edits it."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    backward = _reached(placeholders[num_primals:])
    for node in gm.graph.nodes:
        if node.target in PER_TENSOR and node not in backward and "recompute" not in node.meta:
            chain, roots = _chain(node)
            is_weight = all(root.op == "placeholder" or _is_number(root) for root in roots)  # quantized once a step
            if not is_weight and all(_is_kept(root, chain, backward) for root in roots):
                for part in [*chain, *_results(node)]:
                    part.meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=0)
    return gm


def _reached(starts: Iterable[Node]) -> set[Node]:
    found, todo = set[Node](), list(starts)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.users
    return found


def _chain(quantization: Node) -> tuple[set[Node], set[Node]]:
    """Returns the elementwise operations that lead to a quantization, itself included, and what they start from."""
    chain, roots, todo = {quantization}, set[Node](), list(quantization.all_input_nodes)
    while todo:
        node = todo.pop()
        if node in chain or node in roots:
            continue
        if _is_elementwise(node) and "recompute" not in node.meta:
            chain.add(node)
            todo += node.all_input_nodes
        else:
            roots.add(node)
    return chain, roots


def _is_elementwise(node: Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    tags = getattr(node.target, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags
    return node.target in (*VIEW_OPS, *CAST_OPS) or (torch.Tag.pointwise in tags and not random)


def _is_kept(root: Node, chain: set[Node], backward: set[Node]) -> bool:
    """Whether something else needs a tensor in the backward, or it is small, or an argument."""
    value = root.meta.get("val")
    if root.op == "placeholder" or not isinstance(value, torch.Tensor) or _is_small(root, chain):
        return True
    others, seen = list(root.users), set[Node]()
    while others:
        user = others.pop()
        if user in backward:
            return True
        if user not in seen and (_is_elementwise(user) or user.target is operator.getitem):
            seen.add(user)
            others += user.users
    return False


def _is_number(root: Node) -> bool:
    value = root.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _is_small(root: Node, chain: set[Node]) -> bool:
    largest = max(node.meta["val"].numel() for node in chain if isinstance(node.meta.get("val"), torch.Tensor))
    return bool(root.meta["val"].numel() * 8 <= largest)


def _results(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is operator.getitem]
