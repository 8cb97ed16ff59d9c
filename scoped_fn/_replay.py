"""The captured graph as a function that every transform can act on.

Derivatives of any order and batched versions are derived from the torch-level graph, not from a lowered one: only there
are `detach`, `no_grad` regions and the rules of custom `autograd.Function`s still visible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from scoped_fn._ambient import Ambient
from scoped_fn._elementary import Elementary
from scoped_fn._graph import copy_graph, output_values
from scoped_fn.stages.captured import Captured

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
CUSTOM = torch.ops.higher_order.autograd_function_apply


@dataclass(frozen=True, eq=False)
class Replay:
    """A captured graph as a pure function of its placeholders.

    Attributes:
        gm: The graph, ready for every transform.
        num_outputs: How many results are the model's own.
        buffers: For each buffer, by name, its index among the arguments.
        assigned: Names of the buffers that follow the model's own results in the graph.
        changed: Names of all buffers that come back, in the order in which they do.
        ambient: The torch settings that the graph was captured under.
    """

    gm: torch.fx.GraphModule
    num_outputs: int
    buffers: dict[str, int]
    assigned: tuple[str, ...]
    changed: tuple[str, ...]
    ambient: Ambient

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Returns the model's own results, then the new buffers."""
        given = list(tensors)
        for i in self.buffers.values():
            given[i] = given[i].clone()  # a buffer changed in place must not change the caller's
        with self.ambient.restored(), Elementary():
            results = self.gm(*given)
        new = dict(zip(self.assigned, results[self.num_outputs :], strict=True))
        new = {name: new[name] if name in new else given[self.buffers[name]] for name in self.changed}
        return [*results[: self.num_outputs], *new.values()]


def make_replay(captured: Captured, changed: tuple[str, ...], ambient: Ambient) -> Replay:
    """Returns the function of a captured graph.

    Args:
        captured: The graph.
        changed: Names of the buffers that it changes, in order.
        ambient: The torch settings that it was captured under.
    """
    params, names = len(captured.source.params), list(captured.source.buffers)
    buffers = {name: params + i for i, name in enumerate(names)}
    return Replay(
        transformable(captured.graph.gm), captured.num_outputs, buffers, captured.new_buffers, changed, ambient
    )


def says_everything(gm: torch.fx.GraphModule) -> bool:
    """Returns whether all derivatives of the model can be derived from its graph.

    Not if there is a custom Function: a graph holds its backward as it is run once, without the rules of custom
    Functions inside. Nor if the model uses transforms: the graph names their levels by number.
    """
    parts = [part for part in gm.children() if isinstance(part, torch.fx.GraphModule)]
    custom = any(node.target is CUSTOM for node in gm.graph.nodes)
    return not custom and not uses_transforms(gm) and all(map(says_everything, parts))


def uses_forward_mode(gm: torch.fx.GraphModule) -> bool:
    """Returns whether a captured graph enters forward mode."""
    return any(getattr(node.target, "__name__", "") == "_enter_dual_level" for node in gm.graph.nodes)


def uses_transforms(gm: torch.fx.GraphModule) -> bool:
    """Returns whether a captured graph enters levels of `torch.func`."""
    return any("_functorch" in str(getattr(node.target, "__module__", None)) for node in gm.graph.nodes)


def transformable(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph with checkpoint regions inlined and custom Functions as ones that transforms can act on."""
    made = copy_graph(gm)
    for node in made.graph.nodes:
        if node.target is CHECKPOINT:
            node.target, node.kwargs = _call_body, {}
        elif node.target is CUSTOM:
            node.target = _call_custom
    for name, part in list(made.named_children()):
        if isinstance(part, torch.fx.GraphModule):
            setattr(made, name, transformable(part))
    made.recompile()
    return made


def _call_body(body: torch.fx.GraphModule, *args: Any) -> Any:
    return body(*args)


def _call_custom(
    forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, *args: Any, **options: Any
) -> tuple[Any, ...]:
    if options.get("dirty_idx"):
        raise NotImplementedError("Expected a custom autograd.Function that changes nothing in place, got mark_dirty.")
    rule = Rule.of(forward, backward, tuple(options["non_differentiable_idx"]))
    results = CustomFunction.apply(rule, *args)  # type: ignore[no-untyped-call]
    return tuple(results[: rule.num_outputs])


@dataclass(frozen=True, eq=False)
class Rule:
    """A custom `autograd.Function` as two graphs.

    Attributes:
        forward: Arguments -> results, then what is saved and is neither an argument nor a result.
        backward: Cotangents of the results, then saved values -> gradients.
        num_outputs: How many results there are.
        plain: Indices of the results that carry no gradient.
        saved: Where each saved value is: ("argument" or "result", index).
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    num_outputs: int
    plain: tuple[int, ...]
    saved: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, plain: tuple[int, ...]) -> Rule:
        """Returns the rule that Dynamo's two graphs describe."""
        made = _without_grad_mode(forward)
        outputs, kept = output_values(made)
        results = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        placeholders, num_outputs = made.graph.find_nodes(op="placeholder"), len(results)
        saved: list[tuple[str, int]] = []
        for node in kept:
            if node in placeholders:
                saved.append(("argument", placeholders.index(node)))
            else:
                if node not in results:
                    results.append(node)
                saved.append(("result", results.index(node)))
        made.graph.output_node().args = (tuple(results),)
        made.recompile()
        return cls(made, _without_grad_mode(backward), num_outputs, plain, tuple(saved))


def _without_grad_mode(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph without the switches of grad mode around it, which Dynamo adds; the user's own stay."""
    made = copy_graph(gm)
    inner = [node for node in made.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    if len(inner) > 1 and all(_name(node) == "_set_grad_enabled" for node in (inner[0], inner[-1])):
        made.graph.erase_node(inner[0])
        made.graph.erase_node(inner[-1])
        made.recompile()
    return made


def _name(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


class CustomFunction(torch.autograd.Function):
    """A custom Function of the model, as eager runs it, for every transform and order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rule: Rule, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the results, then the saved values that are neither arguments nor results."""
        return tuple(rule.forward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Saves what the backward reads. As in eager, saved values that are no results are constants to it."""
        rule, *args = inputs
        kept = {"argument": args, "result": output}
        ctx.rule, ctx.num_args = rule, len(args)
        ctx.save_for_backward(*(kept[where][i] for where, i in rule.saved))
        plain = [*rule.plain, *range(rule.num_outputs, len(output))]
        ctx.mark_non_differentiable(*(output[i] for i in plain))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns what the model's own backward does."""
        grads = ctx.rule.backward(*cotangents[: ctx.rule.num_outputs], *ctx.saved_tensors)
        grads = grads if isinstance(grads, (tuple, list)) else (grads,)
        return (None, *grads, *[None] * (ctx.num_args - len(grads)))
