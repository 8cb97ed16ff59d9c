"""`compile` and `release`: the chain of stages, in order."""

from __future__ import annotations

from typing import Any

import torch

from scoped_fn._backends import Backend, check_backend
from scoped_fn._chain import Training, compile_captured
from scoped_fn._compiled import CompiledFn, normal_mode
from scoped_fn._plan import Plan
from scoped_fn._state_check import check_state
from scoped_fn.passes import Passes
from scoped_fn.stages.apply import apply
from scoped_fn.stages.assemble import assemble_inference, assemble_training
from scoped_fn.stages.autocast import autocast
from scoped_fn.stages.capture import capture as capture_stage
from scoped_fn.stages.capture import check_type
from scoped_fn.state import CompilerState


def compile(
    state: CompilerState,
    model_or_fn: Any,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    backend: Backend = "inductor",
    passes: Passes = Passes(),
    capture: str = "dynamo",
    rng: str | None = None,
    name: str | None = None,
) -> tuple[CompilerState, CompiledFn]:
    """Returns the state with a new owner, and the model as a compiled pure function.

    The chain of stages: capture, autocast, lower, partition, compile, assemble. If grad mode is on and a parameter or
    input requires a gradient, forward and backward are compiled, both now; otherwise the forward alone. Calls of
    another kind (other shapes, other Python numbers, with or without gradients, in another autocast scope) compile when
    they first come, once.

    Args:
        state: Any state. It stays valid, also when this raises.
        model_or_fn: A `torch.nn.Module`, or a function of structured tensors. A module is read, never written to.
        inputs: Example positional arguments, a tuple. Only structure, shapes, dtypes and devices matter.
        kwargs: Example keyword arguments.
        backend: "inductor"; "eager", which runs the graphs as they are; or `(gm, example_inputs) -> callable`.
        passes: Pure graph passes, by level.
        capture: "dynamo", or "trace" for Python code that Dynamo refuses.
        rng: None refuses random ops; "torch" lets them draw from torch's generators, as eager does. That is impure:
            the result depends on the generator, not on the state.
        name: What messages call the owner; by default the class or function's name.

    Raises:
        CaptureError: The model is not one pure graph. `MutationError` and `RandomOpError` are kinds of it.
        SpecError: An option or input is not what it should be.

    Example:
        >>> import torch, scoped_fn as sf
        >>> state, fn = sf.compile(sf.init_state(), lambda x: x * 2, (torch.ones(3),), backend="eager")
        >>> state, doubled = fn(state, torch.arange(3.0))
        >>> doubled
        tensor([0., 2., 4.])
    """
    check_state(state)
    check_backend(backend)
    check_type("passes as", passes, Passes, "Write sf.Passes(joint=my_pass).")
    plan = Plan(backend, passes, capture)
    with normal_mode(torch.is_grad_enabled()):
        state, captured = capture_stage(state, model_or_fn, inputs, kwargs, name=name, mode=capture, rng=rng)
        state, captured = apply(state, captured, passes.captured)
        state, captured = autocast(state, captured)
        state, pieces = compile_captured(state, captured, plan)
        if isinstance(pieces, Training):
            return assemble_training(state, captured, pieces.split, pieces.forward, pieces.backward, plan=plan)
        return assemble_inference(state, captured, pieces.inference, pieces.compiled, plan=plan)
