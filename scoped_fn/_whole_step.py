"""`value_and_grad` of a compiled function: forward and backward as one compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from scoped_fn._backends import GraphRole
from scoped_fn._chain import split_joint
from scoped_fn._compiled import CompiledFn
from scoped_fn._errors import SpecError
from scoped_fn._graph import Graph, copy_graph, fake_value, output_values
from scoped_fn._plan import Plan
from scoped_fn._runtime import Variant
from scoped_fn._specialize import recapture
from scoped_fn._structure import Structure, flatten, unflatten
from scoped_fn._variants import Finish, finish_outputs, whole_variant
from scoped_fn.passes import identity
from scoped_fn.stages.apply import apply
from scoped_fn.stages.captured import Captured
from scoped_fn.stages.compile_graph import compile_graph
from scoped_fn.stages.lower import Joint, lower_joint
from scoped_fn.stages.partition import Split
from scoped_fn.state import CompilerState


@dataclass(frozen=True)
class WholeStep:
    """The stateful function `(state, *args) -> (state, (value, gradients))` of a compiled one.

    Attributes:
        fn: The compiled function; its memo keeps the code.
        argnums: Which arguments to differentiate.
        has_aux: Whether the function returns (value, aux).
    """

    fn: CompiledFn
    argnums: int | tuple[int, ...]
    has_aux: bool

    def __call__(self, state: CompilerState, *args: Any, **kwargs: Any) -> tuple[CompilerState, Any]:
        """Returns the next state, and the value with the gradients."""
        fn = self.fn
        tensors, structure = fn.bind(state, args, kwargs)
        kind = ("value_and_grad", self.argnums, self.has_aux)
        variant = fn._memo.find_or_make(
            kind, structure, tensors, lambda ambient: self._make(kind, state, args, structure, tensors)
        )
        with torch.no_grad():
            results = variant.launch(tensors)
            return fn.next_state(state, variant, results), variant.finish(results, tensors)

    def _make(
        self, kind: Any, state: CompilerState, args: tuple[Any, ...], structure: Structure, tensors: list[torch.Tensor]
    ) -> Variant:
        fn = self.fn
        groups = [argument_group(fn, args, i) for i in self._places]
        wanted = [False] * len(tensors)
        for group in groups:
            for i in group.wanted:
                wanted[i] = True
        with torch.inference_mode(False), torch.enable_grad():
            captured, plan = recapture(fn, state, structure, tensors, wanted)
            captured = _only_value_differs(captured, self.has_aux)
            start, constants = captured.num_held - len(captured.constants), (False,) * len(captured.constants)
            joint = lower_joint(captured, (*wanted[:start], *constants, *wanted[start:]), plan.backend)
            state, joint = apply(state, joint, plan.passes.joint)
            graph, whole = _one_graph(state, joint, plan)
            role = GraphRole(
                len(graph.outputs), torch_rng=captured.rng == "torch", whole=whole, lowered_for=plan.backend
            )
            compiled = compile_graph(graph, plan.backend, role)
        fn._memo.compiled_graphs += 1
        at = {i if i < start else i - len(constants): joint.num_forward + n for n, i in enumerate(joint.grads)}
        finish = self._finish(finish_outputs(captured), groups, at)
        return whole_variant(kind, captured, compiled, joint.new_buffers, fn._memo, finish)

    @property
    def _places(self) -> tuple[int, ...]:
        return (self.argnums,) if isinstance(self.argnums, int) else self.argnums

    def _finish(self, value_of: Finish, groups: list[Group], at: dict[int, int]) -> Finish:
        single = isinstance(self.argnums, int)

        def finish(results: Sequence[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
            grads = [group.build(results, tensors, at) for group in groups]
            return value_of(results, tensors), grads[0] if single else tuple(grads)

        return finish


@dataclass(frozen=True, eq=False)
class Group:
    """The tensors of one differentiated argument.

    Attributes:
        indices: Where they are among parameters, buffers and inputs.
        wanted: Those of them that get a gradient; the others get zeros.
        names: Parameter names, if the argument is the parameters.
        structure: Structure of any other argument.
    """

    indices: range
    wanted: tuple[int, ...]
    names: tuple[str, ...] | None
    structure: Structure | None

    def build(self, results: Sequence[torch.Tensor], tensors: list[torch.Tensor], at: dict[int, int]) -> Any:
        """Returns the gradients in the structure of the argument."""
        grads = [results[at[i]] if i in at else torch.zeros_like(tensors[i]) for i in self.indices]
        if self.names is not None:
            return dict(zip(self.names, grads, strict=True))
        return unflatten(self.structure, grads)  # type: ignore[arg-type]


def argument_group(fn: CompiledFn, args: tuple[Any, ...], place: int) -> Group:
    """Returns where the tensors of one argument are.

    Raises:
        SpecError: There is no such argument, or one of its tensors is not differentiable.
    """
    source = fn.captured.source
    if not isinstance(place, int) or not 0 <= place < len(args):
        raise SpecError(f"Expected argnums from 0 to {len(args) - 1}, got {place!r}. Count arguments after the state.")
    if source.is_module and place == 0:
        trainable = tuple(i for i, p in enumerate(source.params.values()) if p.requires_grad)
        return Group(range(len(source.params)), trainable, tuple(source.params), None)
    first = 1 if source.is_module else 0
    start = len(source.params) + len(source.buffers) + len(flatten(args[first:place], "inputs")[0])
    tensors, structure = flatten(args[place], "inputs")
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise SpecError(
                f"Expected argument {place} to have floating point tensors to differentiate, got {tensor.dtype}. "
                "Choose others with argnums."
            )
    indices = range(start, start + len(tensors))
    return Group(indices, tuple(indices), None, structure)


def check_scalar(value: Any) -> Any:
    """Returns the value if it is a real scalar; raises `SpecError` if not."""
    if not isinstance(value, torch.Tensor) or value.shape != () or not value.is_floating_point():
        shown = (
            f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        )
        raise SpecError(
            f"Expected a scalar to differentiate, a floating point tensor of shape [], got {shown}. Reduce it."
        )
    return value


def _only_value_differs(captured: Captured, has_aux: bool) -> Captured:
    """Returns the captured graph with every output but the value detached; checks that the value is a scalar."""
    gm = copy_graph(captured.graph.gm)
    values = output_values(gm)
    out = unflatten(captured.out_structure, [fake_value(node) for node in values[: captured.num_outputs]])
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise SpecError(
            f"Expected {captured.source.name} to return (value, aux), got a {type(out).__name__}. Drop has_aux."
        )
    check_scalar(out[0] if has_aux else out)
    with gm.graph.inserting_before(gm.graph.output_node()):
        for i, node in enumerate(values[1:], start=1):
            values[i] = gm.graph.call_method("detach", (node,))
            values[i].meta = dict(node.meta)
    gm.graph.output_node().args = (tuple(values),)
    gm.recompile()
    return replace(captured, graph=replace(captured.graph, gm=gm))


def _one_graph(state: CompilerState, joint: Joint, plan: Plan) -> tuple[Graph, bool]:
    """Returns forward and backward as one graph, and whether the backend's whole-graph passes are still to come."""
    by_hand = plan.passes.forward is not identity or plan.passes.backward is not identity
    if joint.tangents and (by_hand or _has_checkpoint(joint.graph)):
        _, split = split_joint(state, joint, replace(plan, passes=replace(plan.passes, joint=identity)))
        return _with_unit_tangents(_merge(split), joint), False
    return _with_unit_tangents(joint.graph, joint), True


def _has_checkpoint(graph: Graph) -> bool:
    return any("recompute" in node.meta for node in graph.gm.graph.nodes)


def _merge(split: Split) -> Graph:
    """Returns the forward followed by the backward, so that what the partition recomputes is recomputed."""
    joint, graph = split.joint, torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in joint.graph.gm.graph.find_nodes(op="placeholder"):
        copies[node] = graph.node_copy(node)
    primals = list(copies.values())[: joint.num_primals]
    tangents = list(copies.values())[joint.num_primals :]
    forward = _inline(graph, split.forward.gm, primals)
    grads = _inline(graph, split.backward.gm, [*forward[joint.num_forward :], *tangents])
    graph.output([*forward[: joint.num_forward], *grads])
    root = torch.nn.Module()
    for part in (split.forward.gm, split.backward.gm):
        for node in part.graph.find_nodes(op="get_attr"):
            setattr(root, str(node.target), getattr(part, str(node.target)))
    return replace(joint.graph, gm=torch.fx.GraphModule(root, graph))


def _inline(graph: torch.fx.Graph, gm: torch.fx.GraphModule, inputs: list[Any]) -> list[Any]:
    copies = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    return list(graph.graph_copy(gm.graph, copies))  # type: ignore[arg-type]


def _with_unit_tangents(graph: Graph, joint: Joint) -> Graph:
    """Returns the graph without tangents: one for the value, zero for anything else."""
    gm = copy_graph(graph.gm)
    nodes = gm.graph.find_nodes(op="placeholder")[joint.num_primals :]
    for node, index in zip(nodes, joint.tangents, strict=True):
        fake = node.meta["val"]
        with gm.graph.inserting_after(nodes[-1]):
            options = {"dtype": fake.dtype, "device": fake.device, "pin_memory": False}
            number = 1.0 if index == 0 else 0.0
            unit = gm.graph.call_function(torch.ops.aten.full.default, (list(fake.shape), number), options)
        unit.meta = {"val": fake}
        node.replace_all_uses_with(unit)
    for node in nodes:
        gm.graph.erase_node(node)
    gm.recompile()
    return Graph(gm, graph.inputs[: joint.num_primals], graph.outputs)
