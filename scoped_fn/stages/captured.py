"""`Captured`: a model as one torch-level graph, and how its raw capture becomes one."""

from __future__ import annotations

import keyword
import operator
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.fx

from scoped_fn._ambient import Ambient
from scoped_fn._errors import CaptureError
from scoped_fn._graph import Graph, fake_value, user_line
from scoped_fn._source import Source
from scoped_fn._specs import TensorSpec
from scoped_fn._structure import Structure
from scoped_fn._torch.aten import is_higher_order
from scoped_fn._torch.tensors import storage_id
from scoped_fn.state import FrozenDict

Artifact = TypeVar("Artifact")


@dataclass(frozen=True, eq=False)
class Captured:
    """One call of a model as a flat torch-level graph.

    Attributes:
        owner: Token of the owner in the state.
        source: What was captured.
        graph: Placeholders: parameters, buffers, constants, inputs. Outputs: the model's tensors, then the buffers that
            it assigned anew. No output shares memory with an input or another output. Buffers that the model changes
            in place are changed in place here; the lowering turns that into outputs.
        constants: Tensors reached through closures or plain attributes, by reference.
        specs: The spec of each placeholder.
        in_structure: Structure of (args, kwargs).
        out_structure: Structure of the result.
        num_outputs: How many outputs are the model's own.
        new_buffers: Names of the buffers that follow them.
        rng: "key" if random operations draw from the state's key, which then is the last input, or "torch".
        grad_mode: Whether grad mode was on; the graph is valid in that mode.
        ambient: The other torch settings that it was captured under.
        needs_code: Whether it is lowered from the model's own code, because the graph does not say everything.
        fp8: The `Fp8Plan` of its sites, once the stage `autocast` has been applied; its placeholders and outputs are
            followed by those of FP8.
        facts: Constants of the state that passes and stages read on the way to this, and what they were.
    """

    owner: int
    source: Source
    graph: Graph
    constants: tuple[torch.Tensor, ...]
    specs: tuple[TensorSpec, ...]
    in_structure: Structure
    out_structure: Structure
    num_outputs: int
    new_buffers: tuple[str, ...]
    rng: str
    grad_mode: bool
    ambient: Ambient
    needs_code: bool = False
    fp8: Any = None
    facts: FrozenDict[str, Any] = field(default_factory=FrozenDict)

    def __str__(self) -> str:
        return str(self.graph)

    @property
    def keyed(self) -> bool:
        """Whether it takes a key."""
        return self.in_structure.keyed

    @property
    def num_held(self) -> int:
        """How many placeholders come before the inputs."""
        return len(self.source.params) + len(self.source.buffers) + len(self.constants)

    def with_constants(self, values: Sequence[Any], constants: Sequence[Any] | None = None) -> list[Any]:
        """Returns values of parameters, buffers, inputs and what follows them with those of the constants in place."""
        start = self.num_held - len(self.constants)
        return [*values[:start], *(self.constants if constants is None else constants), *values[start:]]

    def placeholder_kind(self, index: int) -> str:
        """Returns "parameter", "buffer", "constant" or "input"."""
        ends = {
            "parameter": len(self.source.params),
            "buffer": len(self.source.buffers),
            "constant": len(self.constants),
        }
        for kind, count in ends.items():
            if index < count:
                return kind
            index -= count
        return "input"


def captured_of(artifact: Any) -> Captured:
    """Returns the `Captured` that an artifact was made from."""
    made = getattr(artifact, "joint", artifact)
    return made if isinstance(made, Captured) else made.captured


def with_facts(artifact: Artifact, read: Mapping[str, Any]) -> Artifact:
    """Returns a `Captured`, or what was made from one, with constants that were read on the way to it."""
    if not read:
        return artifact
    made: Any = artifact
    if isinstance(made, Captured):
        return replace(made, facts=FrozenDict({**made.facts, **read}))  # type: ignore[return-value]
    part = "joint" if hasattr(made, "joint") else "captured"
    return replace(made, **{part: with_facts(getattr(made, part), read)})  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Pieces:
    """A raw capture: any order of placeholders, outputs as nodes or as the real tensors that were passed through.

    Attributes:
        gm: The raw graph.
        values: The real tensor behind each of its placeholders.
        outputs: For each result tensor: an index into the raw graph's outputs, or a real tensor.
        marker: Index of an output that only keeps the raw graph from being empty.
    """

    gm: torch.fx.GraphModule
    values: Sequence[Any]
    outputs: Sequence[int | torch.Tensor]
    marker: int | None = None


@dataclass(frozen=True, eq=False)
class CallTensors:
    """The tensors of one call: what the placeholders of the finished graph stand for.

    Attributes:
        source: The model.
        inputs: The input tensors.
        input_names: Where each is among the arguments.
    """

    source: Source
    inputs: Sequence[torch.Tensor]
    input_names: Sequence[str]

    @property
    def held(self) -> list[torch.Tensor]:
        """Parameters, then buffers."""
        return [*self.source.params.values(), *self.source.buffers.values()]


def normalize(
    pieces: Pieces, frame: CallTensors, output_names: Sequence[str]
) -> tuple[Graph, tuple[torch.Tensor, ...]]:
    """Returns the graph with placeholders in the order of `Captured`, and its constants."""
    constants = _constants(pieces, frame)
    real = [*frame.held, *constants, *frame.inputs]
    names = [*frame.source.params, *frame.source.buffers]
    names += [f"constant_{i}" for i in range(len(constants))] + list(frame.input_names)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(identifier) for identifier in _identifiers(names)]
    of_tensor = {id(tensor): node for tensor, node in zip(real, nodes, strict=True)}
    copies = {
        old: of_tensor[id(value)]
        for old, value in zip(pieces.gm.graph.find_nodes(op="placeholder"), pieces.values, strict=True)
        if isinstance(value, torch.Tensor)
    }
    for old, new in copies.items():
        new.meta.setdefault("val", fake_value(old))
    for node, tensor in zip(nodes, real, strict=True):
        if fake_value(node) is None:
            node.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    raw_outputs: Any = graph.graph_copy(pieces.gm.graph, copies)
    outputs = [
        (of_tensor.get(id(o)) or _view(graph, o, real, nodes)) if isinstance(o, torch.Tensor) else raw_outputs[o]
        for o in pieces.outputs
    ]
    graph.output(tuple(_separate(graph, outputs, nodes)))
    if pieces.marker is not None and not raw_outputs[pieces.marker].users:
        graph.erase_node(raw_outputs[pieces.marker])
    gm = torch.fx.GraphModule(pieces.gm, graph, class_name=frame.source.name)
    _refuse_python_numbers(gm)
    return Graph(gm, tuple(names), tuple(output_names)), constants


def with_constants_checked(constants: tuple[torch.Tensor, ...], where: str) -> tuple[torch.Tensor, ...]:
    """Returns the constants; raises if a gradient would be lost in one."""
    for tensor in constants:
        if tensor.requires_grad:
            raise CaptureError(
                f"Expected every tensor that needs a gradient to be an argument or a parameter of {where}, got a "
                f"tensor of shape {list(tensor.shape)} reached through a closure or a plain attribute. "
                "Pass it as an argument, register it as a parameter, or detach it."
            )
    return constants


def warn_about_side_effects(source: Source, places: Sequence[str]) -> None:
    """Warns that the model changes Python objects, if it does."""
    if places:
        warnings.warn(
            f"Expected {source.name} to change nothing but its buffers, got changes to Python objects: "
            f"{', '.join(places)}. A compiled function is pure and does not make them: return the values, "
            "or keep them in buffers.",
            stacklevel=2,
        )


def refuse_none(source: Source, buffers: dict[str, Any], unset: Sequence[Any]) -> None:
    """Raises `CaptureError` if a buffer became None, or one that was None became a tensor."""
    gone = [name for name, value in buffers.items() if value is None]
    born = [name for (_, name), value in zip(source.unset_buffers, unset, strict=True) if value is not None]
    if gone or born:
        raise CaptureError(
            f"Expected {source.name} to keep the buffers it had when it was compiled, got {(gone + born)[0]!r} "
            f"{'set to None' if gone else 'set, which was None'}. Register it as a tensor, and assign tensors."
        )


def _constants(pieces: Pieces, frame: CallTensors) -> tuple[torch.Tensor, ...]:
    arguments = [*frame.held, *frame.inputs]
    known = {id(tensor) for tensor in arguments}
    found: dict[int, torch.Tensor] = {}
    views = [o for o in pieces.outputs if isinstance(o, torch.Tensor) and _base(o, arguments) is not None]
    known |= {id(view) for view in views}
    for value in [*pieces.values, *pieces.outputs]:
        if isinstance(value, torch.Tensor) and id(value) not in known:
            if id(value) in frame.source.originals:
                raise CaptureError(
                    f"Expected {frame.source.name} to reach its tensors through its own modules, got "
                    f"{frame.source.originals[id(value)]!r} through a closure, which would keep its present value. "
                    "Use self, or pass it as an argument."
                )
            found[id(value)] = value
        elif not isinstance(value, (torch.Tensor, int)):
            raise CaptureError(
                f"Expected only tensors to enter the graph, got a {type(value).__name__}. Pass it as a Python number, "
                "or keep it out of forward."
            )
    return with_constants_checked(tuple(found.values()), frame.source.name)


def _base(view: torch.Tensor, arguments: Sequence[torch.Tensor]) -> int | None:
    """Returns which argument has the memory of a tensor, if one does."""
    return next((i for i, t in enumerate(arguments) if storage_id(t) == storage_id(view)), None)


def _view(
    graph: torch.fx.Graph, view: torch.Tensor, real: Sequence[torch.Tensor], nodes: Sequence[torch.fx.Node]
) -> torch.fx.Node:
    """Returns a node for a result that Dynamo takes as an attribute of an argument, such as `x.T`."""
    index = _base(view, real)
    base = real[index] if index is not None else view
    parts = base.is_complex() and not view.is_complex() and view.shape == base.shape and not base.is_conj()
    known = view.dtype == base.dtype and view.storage_offset() == base.storage_offset() and not view.is_neg()
    if index is None or not (parts or known):
        raise CaptureError(
            f"Expected results that operations compute, got an attribute of an argument, of shape {list(view.shape)}. "
            "Return a clone of it."
        )
    if parts:
        first = view.storage_offset() == 2 * base.storage_offset()
        node = graph.call_function(torch.real if first else torch.imag, (nodes[index],))
    else:
        node = graph.call_function(torch.as_strided, (nodes[index], view.shape, view.stride()))
    if view.is_conj() != base.is_conj() and not parts:
        node = graph.call_function(torch.conj, (node,))
    if base.requires_grad and not view.requires_grad:
        node = graph.call_method("detach", (node,))
    made = graph.call_function(torch.clone, (node,))
    made.meta["val"] = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="meta")
    return made


def _separate(graph: torch.fx.Graph, outputs: list[torch.fx.Node], placeholders: list[torch.fx.Node]) -> list[Any]:
    """Clones each output that shares memory with an input or an earlier output."""
    seen = {storage for node in placeholders if (storage := _storage(node)) is not None}
    result: list[torch.fx.Node] = []
    for node in outputs:
        storage = _storage(node)
        if node.op == "placeholder" or node in result or storage is None or storage in seen:
            clone = graph.call_function(torch.clone, (node,))
            clone.meta = {key: node.meta[key] for key in ("val", "example_value", "stack_trace") if key in node.meta}
            result.append(clone)
        else:
            seen.add(storage)
            result.append(node)
    return result


def _storage(node: torch.fx.Node) -> int | None:
    """Returns an id of the memory behind a node's value, or None where the trace does not tell (a nested graph)."""
    maker = node.args[0] if node.op == "call_function" and node.target is operator.getitem else node
    if isinstance(maker, torch.fx.Node) and is_higher_order(maker.target):
        return None
    value = fake_value(node)
    return storage_id(value) if isinstance(value, torch.Tensor) else None


def _identifiers(names: Sequence[str]) -> list[str]:
    """Returns one Python identifier a name, all different."""
    made: dict[str, None] = {}
    for name in names:
        base = identifier = re.sub(r"\W+", "_", name).strip("_") or "arg"
        base = identifier = f"arg_{base}" if base[0].isdigit() or keyword.iskeyword(base) else base
        while identifier in made:
            identifier = f"{base}_{len(made)}"
        made[identifier] = None
    return list(made)


def _refuse_python_numbers(gm: torch.fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        value = fake_value(node)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CaptureError(
                f"Expected shapes and Python numbers that do not depend on tensor values, got one from {node.name}"
                f"{user_line(node)}. Keep the value in a tensor."
            )
