"""The stage `autocast`: a captured graph to one whose matmuls are in FP8, as the scope on top of the state says."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from scoped_fn._errors import CaptureError
from scoped_fn._fp8.plan import AMAX, SCALE, SINK, Fp8Plan, ScopeKey, check_weights, plan_of, scope_key
from scoped_fn._fp8.results import with_columns
from scoped_fn._fp8.rewrite import Region, collect_amaxes, layout_of
from scoped_fn._fp8.sites import Names, check_dtype, check_skip, dotted, skipped
from scoped_fn._fp8.support import check_support
from scoped_fn._graph import Graph, copy_graph, output_values
from scoped_fn._replay import uses_transforms
from scoped_fn._specs import TensorSpec, spec_of
from scoped_fn.stages.captured import Captured, with_facts
from scoped_fn.state import AutocastScope, CompilerState, active_scope
from scoped_fn.state.fp8_state import gradients_of, selected

NUMBER = "fp8_number"


def autocast(state: CompilerState, captured: Captured) -> tuple[CompilerState, Captured]:
    """Returns the model with its matmuls in FP8, and the state with the scales that it needs.

    Args:
        state: Its innermost scope says what becomes FP8; without one that is on, both come back as they are.
        captured: A captured model; it keeps its own graph.

    Raises:
        SpecError: A skip pattern matches no layer, a matmul is in float64, a custom recipe answers wrongly, or the
            state's constants say that the GPU has no FP8.
        CaptureError: The model uses `torch.func` transforms around its matmuls.
    """
    scope = active_scope(state)
    if scope is None:
        return state, captured
    sites = find_sites(captured, scope)
    captured = with_facts(captured, check_support(state, sites.device))
    columns = sites.plan.columns
    state = with_columns(state, captured.owner, columns, sites.plan.request, sites.device)
    extras = selected(state.fp8[captured.owner], columns) if columns else []
    record = scope.calibrating or (captured.grad_mode and any(spec.requires_grad for spec in captured.specs))
    return state, rewrite(captured, sites, scope_key(scope, columns), extras, record=record)


@dataclass(frozen=True, eq=False)
class Sites:
    """The sites of a captured graph under a scope.

    Attributes:
        region: A copy of the graph, with its matmuls found.
        plan: How each becomes FP8.
        device: Where their weights are.
    """

    region: Region
    plan: Fp8Plan
    device: torch.device | None


def find_sites(captured: Captured, scope: AutocastScope) -> Sites:
    """Returns the sites; raises as `autocast` does."""
    region, names_of = Region(copy_graph(captured.graph.gm)), _names_of(captured)
    placeholders = region.gm.graph.find_nodes(op="placeholder")
    weight_of = {placeholders[i]: placeholders[i] for i in names_of}
    layers = _layers(captured)
    names = Names({placeholders[i]: given for i, given in names_of.items()}, layers)
    region.find(weight_of, names, every=scope.sites == "all")
    found = region.everything()
    own = [name.removesuffix(".weight") for given in names_of.values() for name in given if not name.endswith(".bias")]
    check_skip(scope.skip, [*(name for _, name in found), *layers, *own])
    kinds = {name: m.kind for m, name in found if not skipped(name, scope.skip) and check_dtype(m, name)}
    if kinds and (uses_transforms(captured.graph.gm) or captured.needs_code):
        raise CaptureError(
            f"Expected {captured.source.name} to use no torch.func transforms under FP8 autocast, got some around "
            f"{next(iter(kinds))!r}. Compile what the transform is of under autocast, and transform that."
        )
    devices = [captured.specs[i].device for i in names_of if placeholders[i].users]
    return Sites(region, plan_of(scope, kinds), next(iter(devices), None))


def _names_of(captured: Captured) -> dict[int, tuple[str, ...]]:
    """Returns the names of the placeholders that count as weights: parameters, or a function's arguments."""
    source = captured.source
    if not source.is_module:
        inputs = range(captured.num_held, len(captured.specs))
        return {i: (dotted(captured.graph.inputs[i]),) for i in inputs if captured.specs[i].differentiable}
    aliases: dict[str, list[str]] = {name: [name] for name in source.params}
    for alias, name in source.aliases.items():
        aliases[name].append(alias)
    return {i: tuple(aliases[name]) for i, name in enumerate(source.params)}


def _layers(captured: Captured) -> list[str]:
    """Returns the names of linear layers, which other calls may have as sites."""
    call = captured.source.call
    parts = call.named_modules() if isinstance(call, torch.nn.Module) else ()
    return [name for name, part in parts if name and isinstance(part, torch.nn.Linear)]


def rewrite(
    captured: Captured, sites: Sites, key: ScopeKey, extras: Sequence[torch.Tensor], *, record: bool
) -> Captured:
    """Returns the graph in FP8.

    Its placeholders are followed by the scales and sinks of all columns, where there are any, then by quantized
    weights; its outputs by the amaxes of all columns and the sinks, if `record`.

    Args:
        captured: The model.
        sites: Its sites. They are used up.
        key: The scope, the columns of the scales, and which weights come quantized.
        extras: Tensors like those that the placeholders stand for.
        record: Whether amaxes are wanted.
    """
    check_weights(key.weights, sites.plan.rules)
    region, graph = sites.region, sites.region.gm.graph
    names, specs = _add_inputs(region, key, extras)
    region.rewrite(sites.plan)
    outputs = _add_outputs(region, key) if record and key.columns else ()
    for node in [node for node in graph.nodes if node.name.startswith(NUMBER) and not node.users]:
        graph.erase_node(node)
    region.gm.recompile()
    text = Graph(region.gm, (*captured.graph.inputs, *names), (*captured.graph.outputs, *outputs))
    return replace(
        captured,
        graph=text,
        specs=(*captured.specs, *specs),
        in_structure=replace(captured.in_structure, scope=key),
        new_buffers=(*captured.new_buffers, *outputs),
        fp8=sites.plan,
    )


def _add_inputs(region: Region, key: ScopeKey, extras: Sequence[torch.Tensor]) -> tuple[list[str], list[TensorSpec]]:
    graph, specs = region.gm.graph, [spec_of(tensor, "FP8 state") for tensor in extras]
    names = [SCALE, SINK] if key.columns else []
    names += [f".fp8.weight.{site}.{i}" for site, count, _ in key.weights for i in range(count)]
    nodes = []
    for name, spec in zip(names, specs, strict=True):
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            node = graph.placeholder(re.sub(r"\W", "_", name).strip("_"))
        node.meta["val"] = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        nodes.append(node)
    if key.columns:
        _spread(region, key, nodes[0], nodes[1], nodes[-1])
    codes = iter(nodes[2 if key.columns else 0 :])
    for site, count, _ in key.weights:
        region.values |= {("code", (site, i)): next(codes) for i in range(count)}
    return names, specs


def _spread(region: Region, key: ScopeKey, scale: torch.fx.Node, sink: torch.fx.Node, last: torch.fx.Node) -> None:
    """Takes the vectors apart: one number for each column."""
    graph = region.gm.graph
    sinks = gradients_of(key.columns)
    with graph.inserting_after(last):
        parts = graph.call_function(torch.unbind, (scale,))
    with graph.inserting_after(parts):
        sink_parts = graph.call_function(torch.unbind, (sink,))
    number = torch.empty((), device="meta")
    parts.meta["val"], sink_parts.meta["val"] = (number,) * len(key.columns), (number,) * len(sinks)
    every = [(parts, "scale", i, c) for i, c in enumerate(key.columns)]
    every += [(sink_parts, "sink", i, c) for i, c in enumerate(sinks)]
    at = sink_parts
    for source, kind, i, column in every:
        with graph.inserting_after(at):
            at = region.values[kind, column] = graph.create_node(
                "call_function", operator.getitem, (source, i), name=f"{NUMBER}_{kind}_{i}"
            )
        at.meta["val"] = number


def _add_outputs(region: Region, key: ScopeKey) -> tuple[str, ...]:
    """Adds the amaxes of all columns and the sinks to what the graph returns."""
    graph, sites = region.gm.graph, list(region.amaxes)
    sinks = [region.values["sink", column] for column in gradients_of(key.columns)]
    made, names = [], []
    with graph.inserting_before(graph.output_node()):
        if sites:
            layout = layout_of(key.columns, sites)
            made.append(graph.call_function(collect_amaxes, (layout, [region.amaxes[site] for site in sites])))
            made[-1].meta["val"] = torch.empty(len(key.columns), device="meta")
            names.append(AMAX)
        if sinks:
            made.append(graph.call_function(torch.stack, (sinks,)))
            made[-1].meta["val"] = torch.empty(len(sinks), device="meta")
            names.append(SINK)
    graph.output_node().args = ((*output_values(region.gm), *made),)
    return tuple(names)
