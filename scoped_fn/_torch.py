"""The only door to private torch.

Every private name that the library uses is imported here and nowhere else, so a new torch release breaks in one file,
by name: `tests/test_probe.py` checks each one. Supported: torch 2.11 to 2.15.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._C import _DisableAutocast as disable_autocast
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.effects import with_effects
from torch._inductor.compile_fx import _recursive_joint_graph_passes as joint_graph_passes
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = [
    "CHECK_ERRORS",
    "DynamoCapture",
    "ExportedGraph",
    "FakeTensorMode",
    "TorchDynamoException",
    "capture_with_dynamo",
    "compile_lock",
    "compile_with_inductor",
    "decompose",
    "disable_autocast",
    "export_with_aot",
    "fake_mode",
    "functional_graph",
    "in_transform",
    "is_higher_order",
    "jit_is_tracing",
    "inductor_decompositions",
    "inductor_options",
    "is_any_autocast_enabled",
    "live_graph",
    "make_fx",
    "batchable",
    "call_as_node",
    "operator_arguments",
    "partition_with_min_cut",
    "run_joint_passes",
    "storage_id",
    "top_saved_tensors_hooks",
    "tracing_proxies",
    "version",
    "visible_mutations",
]


@dataclass(frozen=True)
class DynamoCapture:
    """What Dynamo saw.

    Attributes:
        gm: The torch-level graph; its placeholders are whatever tensors the function touched.
        values: The real tensor behind each placeholder: an argument, or something reached through a closure or module.
        rebuild: Graph outputs -> the function's own return value, with inputs and constants put back in place.
        side_effects: Sources of Python objects that the function changed; the changes are not made.
    """

    gm: torch.fx.GraphModule
    values: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    side_effects: tuple[str, ...]


def capture_with_dynamo(function: FunctionType) -> DynamoCapture:
    """Returns the graph of a call without arguments: all tensors come through closures.

    Changes nothing in the process: no Dynamo reset, no installed code.
    """
    # Dynamo writes into the globals of the function it reads. It gets its own, which die with the capture.
    function = FunctionType(
        function.__code__, dict(function.__globals__), function.__name__, function.__defaults__, function.__closure__
    )
    static_shapes = dynamo_config.patch(
        assume_static_by_default=True,
        automatic_dynamic_shapes=False,
        specialize_int=True,
        specialize_float=True,
        allow_rnn=True,
    )
    with static_shapes, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gm = dynamo_graph_capture_for_export(function)()
    sources = [str(w.message).rsplit("check: ", 1)[-1] for w in caught if "side effects" in str(w.message)]
    for warning in caught:
        if "side effects" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return DynamoCapture(
        gm=gm,
        values=tuple(gm._dynamo_bytecode_flatten()),
        rebuild=lambda outputs: gm._dynamo_bytecode_unflatten(tuple(outputs), ()),
        side_effects=tuple(sources),
    )


def fake_mode() -> FakeTensorMode:
    """Returns a mode in which tensors have shapes, dtypes and devices but no data. Shapes are static."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


@dataclass(frozen=True)
class ExportedGraph:
    """An ATen graph and what each of its inputs and outputs means.

    Attributes:
        gm: Flat: tensors in, list of tensors out. Training graphs have placeholders `primals_*` then `tangents_*`.
        tangents: For each tangent placeholder, the index of the output it belongs to, or ("buffer", input index).
        mutated: Input indices whose new values come first among the outputs.
        num_outputs: How many of the function's own outputs follow.
        grads: For each gradient output, the input index it belongs to; None where there is no gradient.
    """

    gm: torch.fx.GraphModule
    tangents: tuple[Any, ...]
    mutated: tuple[int, ...]
    num_outputs: int
    grads: tuple[int | None, ...]


def export_with_aot(module: torch.nn.Module, fakes: Sequence[torch.Tensor], decompositions: Any) -> ExportedGraph:
    """Returns the functional ATen graph of a flat module: joint if gradients are wanted, else forward only.

    Gradients are wanted if grad mode is on and a fake input requires them. The backward is traced outside autocast,
    as eager's backward runs.
    """
    with ExitStack() as stack, functorch_config.patch(backward_pass_autocast="off"):
        joint = aot_export_joint_with_descriptors(stack, module, tuple(fakes), decompositions=decompositions)
        gm = _without_tokens(joint.graph_module)
    gm.graph.set_codegen(torch.fx.graph.CodeGen())
    gm.recompile()
    output = gm.graph.output_node()
    kinds = list(output.meta["desc"])
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    mutated = tuple(_plain_index(d.mutated_input) for d in kinds if isinstance(d, InputMutationAOTOutput))
    num_outputs = sum(isinstance(d, PlainAOTOutput) for d in kinds)
    start = len(mutated) + num_outputs
    unknown = [d for d in kinds[:start] if not isinstance(d, (InputMutationAOTOutput, PlainAOTOutput))]
    unknown += [d for d in kinds[start:] if d is not None and not isinstance(d, GradAOTOutput)]
    if unknown:
        raise RuntimeError(f"Expected only outputs, mutations and gradients in the joint graph, got {unknown}.")
    grads = tuple(_grad_index(d, v) for d, v in zip(kinds[start:], values[start:], strict=True))
    return ExportedGraph(gm, tuple(_tangents(gm)), mutated, num_outputs, grads)


TOKENS = (ForwardTokenAOTInput, BackwardTokenAOTInput, ForwardTokenAOTOutput, BackwardTokenAOTOutput)


def _without_tokens(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns the graph with operations that have effects as plain ones, not ordered by tokens. Edits it."""
    for node in list(gm.graph.nodes):
        if node.target is with_effects:
            _, op, *args = node.args
            with gm.graph.inserting_before(node):
                plain = gm.graph.call_function(op, tuple(args), dict(node.kwargs))
            values = tuple(node.meta["val"])[1:]
            plain.meta = {**node.meta, "val": values if len(op._schema.returns) > 1 else values[0]}
            for user in list(node.users):
                index = user.args[1]
                if index > 0 and len(op._schema.returns) > 1:
                    user.args = (plain, index - 1)
                elif index > 0:
                    user.replace_all_uses_with(plain)
    output = gm.graph.output_node()
    kept = [
        pair
        for pair in zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
        if not isinstance(pair[1], TOKENS)
    ]
    output.args = ([value for value, _ in kept],)
    output.meta["desc"] = [kind for _, kind in kept]
    for node in reversed(list(gm.graph.nodes)):
        tokens = node.op == "placeholder" and isinstance(node.meta.get("desc"), TOKENS)
        if not node.users and (tokens or node.target in (with_effects, operator.getitem)):
            gm.graph.erase_node(node)
    return gm


def _grad_index(kind: Any, value: Any) -> int | None:
    if value is None or kind is None:
        return None
    return _plain_index(kind.grad_of)


def _plain_index(kind: Any) -> int:
    if not isinstance(kind, (PlainAOTInput, PlainAOTOutput)):
        raise RuntimeError(f"Expected a plain input or output of the graph, got {kind}.")
    return kind.idx


def _tangents(gm: torch.fx.GraphModule) -> Iterator[Any]:
    for node in gm.graph.find_nodes(op="placeholder"):
        kind = node.meta.get("desc")
        if isinstance(kind, TangentAOTInput):
            of: Any = kind.output
            mutation = isinstance(of, InputMutationAOTOutput)
            yield ("buffer", _plain_index(of.mutated_input)) if mutation else _plain_index(of)


def partition_with_min_cut(
    joint: torch.fx.GraphModule, primals: Sequence[Any], tangents: Sequence[Any], num_fwd_outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Returns forward and backward graphs; recomputes what is cheap or in a checkpoint region. Edits `joint`."""
    mode = _fake_mode_of([*primals, *tangents])
    with mode, tracing(TracingContext(mode)):
        forward, backward = min_cut_rematerialization_partition(
            joint, (list(primals), list(tangents)), num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=[]
        )
    return forward, backward


def inductor_decompositions() -> Any:
    """Returns the decompositions that Inductor wants to be traced with."""
    return select_decomp_table()


def decompose(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Returns a flat ATen graph traced again with Inductor's decompositions."""
    with _fake_mode_of(example_inputs), torch.no_grad():
        traced = make_fx(gm.forward, decomposition_table=select_decomp_table(), _allow_non_fake_inputs=True)
        result: torch.fx.GraphModule = traced(*example_inputs)
    return result


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


def _native_batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: float) -> Any:
    aten = torch.ops.aten
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, *rest)
    return aten._native_batch_norm_legit.default(x, weight, bias, mean, var, training, *rest)


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


@contextmanager
def inductor_options(*, torch_rng: bool) -> Iterator[None]:
    """Sets per-call Inductor options. `torch_rng`: random ops draw from torch's own generators, as in eager."""
    with inductor_config.patch(fallback_random=torch_rng):
        yield


def run_joint_passes(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Returns the graph after Inductor's joint passes (pattern matching, constant folding). Edits `gm`."""
    mode = _fake_mode_of(example_inputs)
    device = next((t.device for t in example_inputs if isinstance(t, torch.Tensor)), torch.device("cpu"))
    with mode, tracing(TracingContext(mode)):
        result: torch.fx.GraphModule = joint_graph_passes(gm, input_device=device)
    return result


def compile_with_inductor(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, num_visible: int, is_backward: bool, is_inference: bool
) -> tuple[Callable[[list[Any]], Sequence[Any]], list[tuple[int, ...] | None]]:
    """Returns code that takes a list of tensors, which it clears, and returns tensors; and the strides of these.

    Args:
        gm: A flat ATen graph; it is edited.
        example_inputs: Its fake inputs.
        num_visible: The first outputs keep the strides they have in eager; the others may have any.
        is_backward: Whether the graph is a backward.
        is_inference: Whether no gradient is ever taken of it.
    """
    gm.graph.output_node().meta["user_visible_output_idxs"] = list(range(num_visible))
    context = TracingContext(_fake_mode_of(example_inputs))
    with tracing(context), TracingContext.report_output_strides() as reported:
        code: Any = compile_fx_inner(gm, list(example_inputs), is_backward=is_backward, is_inference=is_inference)
    strides = [tuple(int(s) for s in stride) if stride is not None else None for stride in reported or []]
    return code, strides


def _fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    return next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None) or fake_mode()


def in_transform() -> bool:
    """Returns whether a torch.func transform or a forward-mode level is active in this thread."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def version(tensor: torch.Tensor) -> int:
    """Returns how often the tensor was changed in place; works on fake tensors."""
    return int(tensor._version)


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


def storage_id(tensor: torch.Tensor) -> int:
    """Returns a number that two tensors share exactly when they share memory; works on fake tensors."""
    return int(tensor.untyped_storage()._cdata)


tracing_proxies = get_proxy_mode
jit_is_tracing = torch.jit.is_tracing  # type: ignore[attr-defined]
CHECK_ERRORS = torch.ops.aten._linalg_check_errors.default


def call_as_node(code: Callable[[list[Any]], Sequence[Any]], tensors: list[Any]) -> Sequence[Any]:
    """Runs code on real tensors while a graph is being recorded: the call becomes one node of that graph."""
    mode: Any = get_proxy_mode()

    def compiled_call(*given: Any) -> Any:
        return tuple(code(list(given)))

    proxies = [mode.tracer.unwrap_proxy(tensor) for tensor in tensors]
    with disable_proxy_modes_tracing():
        results = compiled_call(*tensors)
    proxy = mode.tracer.create_proxy("call_function", compiled_call, tuple(proxies), {})
    return track_tensor_tree(results, proxy, constant=None, tracer=mode.tracer)
