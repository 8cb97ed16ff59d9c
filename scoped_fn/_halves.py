"""A function in two halves: a forward that saves tensors, and a backward that computes gradients from them.

They are for first derivatives. What is differentiated again is derived from the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.fx

from scoped_fn._chain import split_joint
from scoped_fn._elementary import ElementaryAttention
from scoped_fn._graph import Graph, fake_inputs, output_values
from scoped_fn._pure import Pure
from scoped_fn._root import Root
from scoped_fn._specs import laid_out
from scoped_fn._torch.aot import partition_with_min_cut
from scoped_fn._torch.aten import batchable
from scoped_fn._torch.config import patched
from scoped_fn._torch.dynamo import compile_lock
from scoped_fn._torch.levels import apart
from scoped_fn._trace import NotDerivableError, trace_joint
from scoped_fn._training import TrainingCode
from scoped_fn._unused_outputs import without_tangents
from scoped_fn.stages.lower import lower_joint

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Value:
    """What computes results where nothing is to be derived any more.

    Attributes:
        launch: Runs on plain tensors.
        arguments: Indices of the tensors that it takes.
        pure: The same as a function that can be batched; None if it cannot.
    """

    launch: Callable[[list[torch.Tensor]], Tensors]
    arguments: Sequence[int]
    pure: Pure | None = None


@dataclass(frozen=True, eq=False)
class Halves:
    """Forward and backward.

    Attributes:
        wanted: Indices of the arguments that get gradients.
        num_results: How many results of the forward are the function's; saved tensors follow.
        plain: Indices of the results that carry no gradient.
        forward: Computes results and saved tensors.
        backward: (indices of the results with cotangents, number of arguments) -> what computes gradients of arguments,
            cotangents and saved tensors, and the indices of the arguments that get one.
        watched: (arguments, results) -> those whose memory a saved tensor shares.
    """

    wanted: tuple[int, ...]
    num_results: int
    plain: tuple[int, ...]
    forward: Value
    backward: Callable[[tuple[int, ...], int], tuple[Value, tuple[int, ...]]]
    watched: Callable[[Tensors, Tensors], Tensors]


def halves_of(pure: Pure, wanted: tuple[int, ...], *, batched: bool) -> Halves:
    """Returns the halves of a function.

    Args:
        pure: The function.
        wanted: Indices of the arguments to differentiate.
        batched: Whether they have to be batched; those of the captured graph that need not are compiled better.
    """
    if isinstance(pure, Root) and not batched:
        return pure.once(("code halves", wanted), lambda: _root_halves(pure, wanted))
    return pure.once(("halves", wanted), lambda: _pure_halves(pure, wanted))


def _root_halves(root: Root, wanted: tuple[int, ...]) -> Halves:
    training = root.training(wanted)
    if training is None:
        return _no_gradient(root, wanted)
    halves, launch = code_halves(training, wanted), training.run_forward
    fitted = replace(halves.forward, launch=lambda tensors: launch(root.fitted(tensors)))
    return replace(halves, forward=fitted)


def _no_gradient(pure: Pure, wanted: tuple[int, ...]) -> Halves:
    """Returns halves of a function whose results do not depend on what is wanted."""
    value = Value(pure.launch, range(len(pure.specs)), pure)
    plain = tuple(range(len(pure.outputs)))
    return Halves(wanted, len(pure.outputs), plain, value, lambda used, count: (value, ()), lambda tensors, results: ())


def code_halves(training: TrainingCode, wanted: tuple[int, ...]) -> Halves:
    """Returns the halves that a compiled training call consists of."""

    def backward(used: tuple[int, ...], count: int) -> tuple[Value, tuple[int, ...]]:
        given = [n for n, (i, _) in enumerate(training.tangents) if i in used]
        unused = frozenset(range(len(training.tangents))) - set(given)
        code, places = training.backwards.without(unused)
        cotangents = [count + used.index(training.tangents[n][0]) for n in given]
        first = count + len(used)
        arguments = [*range(first, first + training.num_saved), *cotangents]
        return Value(lambda tensors: training.run_backward(code, tensors, given), arguments), places

    return Halves(
        wanted=wanted,
        num_results=training.num_forward,
        plain=_others(training.num_forward, [i for i, _ in training.tangents]),
        forward=Value(training.run_forward, range(training.num_arguments)),
        backward=cache(backward),
        watched=training.watch,
    )


def _others(count: int, some: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i in range(count) if i not in some)


def _pure_halves(pure: Pure, wanted: tuple[int, ...]) -> Halves:
    with compile_lock:
        forward, backward, tangents, grads = (
            _split_root(pure, wanted) if isinstance(pure, Root) else _split(pure, wanted)
        )
    if not tangents:
        return _no_gradient(pure, wanted)
    count, results = len(pure.specs), len(pure.outputs)
    nodes = output_values(forward.gm)
    arguments = forward.gm.graph.find_nodes(op="placeholder")
    extras = [node for node in nodes[results:] if node not in arguments]
    saved = [(True, arguments.index(n)) if n in arguments else (False, extras.index(n)) for n in nodes[results:]]
    made = Pure(_outputs(forward.gm, [*nodes[:results], *extras]), pure.specs, pure.shop)

    def backward_of(used: tuple[int, ...], num_arguments: int) -> tuple[Value, tuple[int, ...]]:
        half, places = made.once(("backward", used), lambda: _backward(pure, backward, len(saved), tangents, used))
        first = num_arguments + len(used)
        taken = [i if is_argument else first + i for is_argument, i in saved]
        taken += [num_arguments + used.index(i) for i in tangents if i in used]
        return Value(half.launch, taken, half), tuple(grads[i] for i in places)

    value = Value(made.launch, range(count), made)
    return Halves(wanted, results, _others(results, tangents), value, cache(backward_of), lambda tensors, results: ())


def _backward(
    pure: Pure, backward: Graph, num_saved: int, tangents: tuple[int, ...], used: tuple[int, ...]
) -> tuple[Pure, tuple[int, ...]]:
    unused = frozenset(n for n, i in enumerate(tangents) if i not in used)
    graph, places = without_tangents(backward, num_saved, unused)
    return Pure(batchable(graph.gm).forward, [laid_out(fake) for fake in fake_inputs(graph.gm)], pure.shop), places


def _outputs(gm: torch.fx.GraphModule, nodes: Sequence[torch.fx.Node]) -> Callable[..., Tensors]:
    gm.graph.output_node().args = (tuple(nodes),)
    return batchable(gm).forward


Parts = tuple[Graph, Graph, tuple[int, ...], tuple[int, ...]]


def _split_root(root: Root, wanted: tuple[int, ...]) -> Parts:
    """Returns forward and backward of the captured graph, checkpoint regions and the user's passes honoured."""
    try:
        with apart(), torch.inference_mode(False), torch.enable_grad(), root.ambient.restored(), ElementaryAttention():
            flags = tuple(i in wanted for i in range(len(root.specs)))
            joint = lower_joint(root.plan.settings, root.captured, flags, "eager")
            if not joint.tangents:
                return root.captured.graph, root.captured.graph, (), ()
            _, split = split_joint(root.plan.settings, joint, replace(root.plan, backend="eager"))
    except Exception as error:
        raise NotDerivableError(str(error)) from error
    if joint.new_buffers != root.new_buffers:
        raise NotDerivableError(f"the buffers {joint.new_buffers} change, not {root.new_buffers}")
    return split.forward, split.backward, joint.tangents, joint.grads


def _split(pure: Pure, wanted: tuple[int, ...]) -> Parts:
    """Returns forward and backward of a derived function."""
    tangents = pure.differentiable(wanted)
    places, count = pure.reached(wanted, tangents), len(pure.specs)
    cotangents = {i: pure.outputs[i] for i in tangents}
    torch_rng, dual = pure.shop.torch_rng, pure.dual
    with patched(pure.shop.overrides):
        gm = trace_joint(pure.run, pure.specs, places, cotangents, "eager", torch_rng=torch_rng, dual=dual)
    fakes = fake_inputs(gm)
    with apart(), patched(pure.shop.overrides):
        forward, backward = partition_with_min_cut(gm, fakes[:count], fakes[count:], len(pure.outputs))
    return _named(forward), _named(backward), tangents, places


def _named(gm: torch.fx.GraphModule) -> Graph:
    inputs = tuple(str(node.target) for node in gm.graph.find_nodes(op="placeholder"))
    return Graph(gm, inputs, tuple(f"out_{i}" for i in range(len(output_values(gm)))))
