"""The stage `capture`: a model and example inputs to a `Captured`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx
import torch.utils._pytree as pytree

from scoped_fn._ambient import ambient_settings
from scoped_fn._errors import SpecError
from scoped_fn._overrides import known_overrides
from scoped_fn._random.words import words_of
from scoped_fn._source import Source, make_source
from scoped_fn._specs import TensorSpec, plain, spec_of
from scoped_fn._structure import Structure, flatten, paths, unflatten
from scoped_fn._torch.config import patched
from scoped_fn._torch.dynamo import compile_lock
from scoped_fn._torch.levels import apart
from scoped_fn.stages.capture_dynamo import capture_dynamo
from scoped_fn.stages.capture_trace import capture_trace
from scoped_fn.stages.captured import CallTensors, Captured, Pieces, normalize
from scoped_fn.stages.live_code import needs_code
from scoped_fn.stages.random_keys import draw_from_keys, refuse_lost_draws
from scoped_fn.state import CompilerState, acquire, set_buffers
from scoped_fn.state.owners import check_owner, settle, token_of

Mode = Callable[[Source, Structure, list[torch.Tensor]], tuple[Pieces, Any, dict[str, Any]]]
MODES: tuple[tuple[str, Mode], ...] = (("dynamo", capture_dynamo), ("trace", capture_trace))


def capture(
    state: CompilerState,
    model_or_fn: Any,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    name: str | None = None,
    mode: str = "dynamo",
    rng: str = "key",
    owner: int | None = None,
) -> tuple[CompilerState, Captured]:
    """Returns the model as a graph, and the state with a new owner that holds copies of the model's buffers.

    Args:
        state: Any state.
        model_or_fn: A `torch.nn.Module`, or a function of structured tensors.
        inputs: Example positional arguments, a tuple. Only shapes, dtypes and devices matter.
        kwargs: Example keyword arguments.
        name: What to call the owner; by default the class or function's name.
        mode: "dynamo", or "trace" for Python code that Dynamo refuses.
        rng: "key": random operations draw from the state's key; "torch": from torch's generators.
        owner: A token that no function was captured for, whose overrides are in effect; a new one by default.

    Raises:
        CaptureError: The model is not one graph: a branch on a tensor's value, for instance.
        OwnershipError: The state does not hold the owner, or it has a function.
        SpecError: The inputs are no tuple, or hold objects that are neither tensors nor plain data.
    """
    check_option("capture", mode, tuple(name for name, _ in MODES))
    check_option("rng", rng, ("key", "torch"))
    check_type("inputs as", inputs, tuple, "Write (x,) for one argument.")
    check_type("kwargs as", kwargs if kwargs is not None else {}, dict, "Pass keyword arguments by name.")
    check_type("name as", name if name is not None else "", str, "Pass a text, or nothing.")
    device = words_of(state.key).device
    token = state.next_token if owner is None else check_owner(state, token_of(owner), name)
    source = make_source(model_or_fn, name if owner is None else state.owners[token].name)
    tensors, structure = flatten((inputs, dict(sorted((kwargs or {}).items()))), "inputs")
    after = settle(acquire(state, source.name)[0] if owner is None else state, token)
    with patched(known_overrides(after, token)):
        captured = capture_call(token, source, structure, tensors, mode=mode, rng=rng, device=device)
    if source.buffers:
        after = set_buffers(after, token, {key: held.detach().clone() for key, held in source.buffers.items()})
    return after, captured


def capture_call(
    owner: int,
    source: Source,
    structure: Structure,
    tensors: list[torch.Tensor],
    *,
    mode: str,
    rng: str,
    device: torch.device,
) -> Captured:
    """Returns the graph of one call, with a key on the device if it draws. Reads the source's tensors."""
    _check_arguments(source, structure, tensors)
    names = input_names(source, structure, tensors)
    specs = [spec_of(plain(tensor), name) for tensor, name in zip(tensors, names, strict=True)]
    # Fresh tensor objects: one input passed twice, or a parameter passed as an input, must stay separate inputs.
    fresh = [plain(tensor).data.requires_grad_(tensor.requires_grad) for tensor in tensors]
    with compile_lock, apart():
        pieces, result, new_buffers = dict(MODES)[mode](source, structure, fresh)
    frame = CallTensors(source, fresh, names)
    found, out_structure = flatten(result, "outputs")
    out_names = ["out" + path for path in paths(result)]
    graph, constants = normalize(pieces, frame, [*out_names, *new_buffers])
    held = [spec_of(tensor, key) for key, tensor in [*source.params.items(), *source.buffers.items()]]
    all_specs = (*held, *(spec_of(tensor, "a constant") for tensor in constants), *specs)
    captured = Captured(
        owner=owner,
        source=source,
        graph=graph,
        constants=constants,
        specs=all_specs,
        in_structure=structure,
        out_structure=out_structure,
        num_outputs=len(found),
        new_buffers=tuple(new_buffers),
        rng=rng,
        grad_mode=torch.is_grad_enabled(),
        ambient=ambient_settings("training"),
    )
    captured = replace(captured, needs_code=needs_code(captured))
    return draw_from_keys(captured, device) if rng == "key" else refuse_lost_draws(captured)


def input_names(source: Source, structure: Structure, tensors: list[torch.Tensor]) -> list[str]:
    """Returns what to call each input tensor: the argument's name and the path inside it."""
    args, kwargs = unflatten(structure, tensors)
    return [name for key, value in _arguments(source.call, args, kwargs) for name in (key + p for p in paths(value))]


def describe_inputs(source: Source, structure: Structure, specs: Sequence[TensorSpec]) -> str:
    """Returns the inputs as text: `x: float32[4, 3], scale: 2.0`."""
    args, kwargs = unflatten(structure, list(specs))
    parts = [
        f"{name}{pytree.keystr(path)}: {leaf if isinstance(leaf, TensorSpec) else repr(leaf)}"
        for name, value in _arguments(source.call, args, kwargs)
        for path, leaf in pytree.tree_flatten_with_path(value)[0]
    ]
    return ", ".join(parts) or "no inputs"


def _check_arguments(source: Source, structure: Structure, tensors: list[torch.Tensor]) -> None:
    """Raises `SpecError` if the arguments do not fit the signature."""
    args, kwargs = unflatten(structure, tensors)
    try:
        signature = inspect.signature(source.call.forward if isinstance(source.call, torch.nn.Module) else source.call)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        how = "fn(state, params, ...)" if source.is_module else "fn(state, ...): a function has no params"
        raise SpecError(
            f"Expected arguments of {source.name}{signature}, got {len(args)} positional and {list(kwargs) or 'no'} "
            f"keyword arguments: {error}. Call {how}."
        ) from None


def _arguments(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    function = call.forward if isinstance(call, torch.nn.Module) else call
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positional = [(named[i] if i < len(named) else f"args[{i}]", value) for i, value in enumerate(args)]
    return [*positional, *kwargs.items()]


def check_type(what: str, value: Any, kind: type, advice: str) -> None:
    """Raises `SpecError` if a value has another type."""
    if not isinstance(value, kind):
        raise SpecError(f"Expected {what} a {kind.__name__}, got a {type(value).__name__}. {advice}")


def check_option(option: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raises `SpecError` if an option has a value that does not exist."""
    if value not in allowed:
        raise SpecError(
            f"Expected {option} to be one of {', '.join(map(repr, allowed))}, got {value!r}. Pick one of them."
        )
