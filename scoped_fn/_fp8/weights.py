"""`quantize_weights`: weights in FP8 as a value, for several calls between two updates of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from scoped_fn._compiled import CompiledFn, ordered_params
from scoped_fn._errors import SpecError
from scoped_fn._fp8.plan import ROLES, SITE, Column, scope_key
from scoped_fn._fp8.quantized_params import QuantizedParams
from scoped_fn._fp8.results import with_columns
from scoped_fn._fp8.sites import is_view, origin
from scoped_fn._replay import CHECKPOINT
from scoped_fn._state_check import check_state
from scoped_fn.kernels import encode_weight, fp8_linear, fp8_matmul
from scoped_fn.stages.captured import Captured
from scoped_fn.state import CompilerState, active_scope
from scoped_fn.state.fp8_state import stage_amax


def quantize_weights(
    state: CompilerState, fn: CompiledFn, params: Mapping[str, torch.Tensor]
) -> tuple[CompilerState, QuantizedParams]:
    """Returns parameters whose FP8 weights are quantized already, which `fn` takes in place of `params`.

    For several calls with the same weights, as with gradient accumulation: calls with what this returns quantize no
    weight, and give the same bits. The weights' amaxes are staged here, once, and not by those calls. A value like any
    other: new parameters have to be quantized anew.

    Args:
        state: A state whose innermost scope is on, with the scales to quantize by.
        fn: A compiled module that was compiled or called under that scope.
        params: Parameters, as `fn` takes them.

    Returns:
        The state, and a mapping of the parameters by name. Gradients come back by the same names, and belong to the
        parameters.

    Raises:
        SpecError: No scope is on, or `fn` was not called under it.

    Example:
        >>> import torch, scoped_fn as sf
        >>> state = sf.autocast(sf.init_state(), sf.Float8CurrentScaling())
        >>> state, fn = sf.compile(state, torch.nn.Linear(4, 3), (torch.ones(2, 4),), backend="eager")
        >>> state, weights = sf.quantize_weights(state, fn, fn.params)
        >>> a, b = fn(state, weights, torch.ones(2, 4))[1], fn(state, fn.params, torch.ones(2, 4))[1]
        >>> torch.equal(a, b)
        True
    """
    check_state(state)
    if not isinstance(fn, CompiledFn):
        raise SpecError(f"Expected a compiled function, got a {type(fn).__name__}. Pass the fn that compile gave.")
    captured = _captured(state, fn)
    named = dict(zip(captured.source.params, ordered_params(fn, params), strict=True))
    state = with_columns(state, fn.owner, captured.fp8.columns, captured.fp8.request)
    held = state.fp8.get(fn.owner)
    places = {column: i for i, column in enumerate(held.columns)} if held else {}
    codes: dict[str, tuple[torch.Tensor, ...]] = {}
    amaxes: dict[Column, torch.Tensor] = {}
    with torch.no_grad():
        for site, weight in _weights(captured, named).items():
            quantizer, column = captured.fp8.rules[site].weight, (site, ROLES[1])
            if quantizer.kind in ("none", "nvfp4"):
                continue
            scale = held.scale[places[column]] if held is not None and column in places else None
            codes[site], amax = encode_weight(_as_autocast_does(weight), quantizer, scale)
            if column in places:
                amaxes[column] = amax
    rules = {site: str(captured.fp8.rules[site].weight) for site in codes}
    if held is not None and amaxes:
        staged = stage_amax(held, torch.stack(list(amaxes.values())), tuple(amaxes))
        state = replace(state, fp8=state.fp8.set(fn.owner, staged))
    return state, QuantizedParams(named, codes, rules)


def _as_autocast_does(weight: torch.Tensor) -> torch.Tensor:
    device = weight.device.type
    return weight.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else weight


def _captured(state: CompilerState, fn: CompiledFn) -> Captured:
    """Returns a graph of the function under the scope that is on."""
    scope = active_scope(state)
    if scope is None or scope.calibrating:
        raise SpecError(
            "Expected a state with an open autocast scope that is enabled and not calibrating, got none. "
            "Open one with state = sf.autocast(state, recipe)."
        )
    key = scope_key(scope, ())
    found = [inline.captured for inline in fn._memo.inlines if inline.key == key]
    if not found:
        raise SpecError(
            f"Expected {fn.name} to have been compiled or called under this autocast scope, got a new one. "
            "Call it once before its weights are quantized."
        )
    return found[0]  # type: ignore[no-any-return]


def _weights(captured: Captured, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights (N, K) that are views or casts of parameters, by site, as their matmuls read them.

    Left out are those that matmuls of one site read in several ways, and batches of matrices.
    """
    placeholders = captured.graph.gm.graph.find_nodes(op="placeholder")
    found: dict[str, list[torch.Tensor]] = {}
    _collect(captured.graph.gm, dict(zip(placeholders, params.values(), strict=False)), found)
    alike = {site: {(w.shape, w.stride(), w.dtype) for w in weights} for site, weights in found.items()}
    return {site: ws[0] for site, ws in found.items() if len(alike[site]) == 1 and ws[0].dim() == 2}


def _collect(gm: torch.fx.GraphModule, values: dict[Any, torch.Tensor], found: dict[str, list[torch.Tensor]]) -> None:
    for node in gm.graph.nodes:
        if node.target in (fp8_linear, fp8_matmul) and origin(node.args[1], frozenset(values)) is not None:
            weight = _value(node.args[1], values)
            if weight is None:
                found.setdefault(node.meta[SITE], []).append(torch.empty(0))  # it cannot be quantized beforehand
            else:
                transposed = node.target is fp8_matmul and not node.args[6] and weight.dim() > 1
                found.setdefault(node.meta[SITE], []).append(weight.mT if transposed else weight)
        elif node.target is CHECKPOINT:
            body = getattr(gm, str(node.args[0].target))
            given = zip(body.graph.find_nodes(op="placeholder"), node.args[1:], strict=False)
            _collect(body, {mine: values[theirs] for mine, theirs in given if theirs in values}, found)


def _value(node: torch.fx.Node, values: dict[Any, torch.Tensor]) -> Any:
    """Returns the value of a view or cast of a parameter; None if it depends on more, or may be changed in place."""
    if node in values:
        return values[node]
    if len(node.all_input_nodes) != 1 or not _is_only_read(node):
        return None
    first = _value(node.args[0], values)  # type: ignore[arg-type]
    if first is None:
        return None
    if node.op == "call_method":
        return getattr(first, str(node.target))(*node.args[1:], **node.kwargs)
    return node.target(first, *node.args[1:], **node.kwargs)  # type: ignore[operator]


def _is_only_read(node: torch.fx.Node) -> bool:
    """Whether nothing but views and FP8 matmuls uses a value."""
    return all(
        user.target in (fp8_linear, fp8_matmul) or (is_view(user) and _is_only_read(user)) for user in node.users
    )
