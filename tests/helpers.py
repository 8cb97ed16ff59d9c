"""What several test files share: a short way to compile, an eager oracle, and checks of purity."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

import scoped_fn as sf
from tests.cases.casekit import fingerprint_diff, global_fingerprint, weighted_loss


def compiled(
    model_or_fn: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = "eager",
    **options: Any,
) -> tuple[sf.CompilerState, sf.CompiledFn]:
    """A fresh state and the compiled function, with the backend that compiles fastest."""
    return sf.compile(sf.init_state(), model_or_fn, inputs, kwargs, backend=backend, **options)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree of plain containers, in order."""
    return [leaf for leaf in torch_pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def fresh(tree: Any) -> Any:
    """A copy of a tree whose tensors are new leaves with the same values and ``requires_grad``."""

    def renew(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return torch_pytree.tree_map(renew, tree)


def gradients(tree: Any) -> list[torch.Tensor | None]:
    """The ``.grad`` of each tensor of the tree."""
    return [tensor.grad for tensor in tensors(tree)]


def assert_same(actual: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0, what: str = "value") -> None:
    """Both trees have the same structure, dtypes and, within the tolerance (bit for bit by default), values."""
    actual_leaves, actual_spec = torch_pytree.tree_flatten(actual)
    expected_leaves, expected_spec = torch_pytree.tree_flatten(expected)
    assert actual_spec == expected_spec, f"{what}: {actual_spec} is not {expected_spec}"
    for position, (one, other) in enumerate(zip(actual_leaves, expected_leaves, strict=True)):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(
                one, other, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, i=position: f"{what}[{i}]: {text}"
            )
        else:
            assert type(one) is type(other), f"{what}[{position}]: {one!r} is not {other!r}"
            assert one == other, f"{what}[{position}]: {one!r} is not {other!r}"


def assert_mentions(error: BaseException, pattern: str) -> None:
    """The error's text has the pattern somewhere."""
    assert re.search(pattern, str(error)), f"{pattern!r} is not in {error}"


def assert_disjoint(*trees: Any) -> None:
    """No two tensors of the trees share a storage."""
    seen: dict[int, torch.Tensor] = {}
    for tensor in tensors(trees):
        if tensor.untyped_storage().nbytes() == 0:
            continue
        address = tensor.untyped_storage().data_ptr()
        assert address not in seen, f"storage shared by tensors of shape {seen[address].shape} and {tensor.shape}"
        seen[address] = tensor


@contextlib.contextmanager
def process_unchanged() -> Iterator[None]:
    """Everything process-wide, and torch's random stream, is after the block as it was before."""
    before, stream = global_fingerprint(), torch.get_rng_state()
    flags = torch.compiler.is_compiling(), torch.compiler.is_exporting()
    yield
    assert fingerprint_diff(before, global_fingerprint()) == []
    assert (torch.compiler.is_compiling(), torch.compiler.is_exporting()) == flags
    assert torch.equal(stream, torch.get_rng_state()), "torch's random stream moved"


@contextlib.contextmanager
def unchanged(*trees: Any) -> Iterator[None]:
    """The tensors of the trees keep their values, identity apart, over the block."""
    before = [tensor.detach().clone() for tensor in tensors(trees)]
    yield
    assert_same([tensor.detach() for tensor in tensors(trees)], before, what="a tensor that must stay as it was")


def assert_trains_like_eager(
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] = weighted_loss,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    **options: Any,
) -> tuple[sf.CompilerState, sf.CompiledFn]:
    """Output, buffers and all gradients of one compiled training step equal those of an eager twin.

    Parameters are passed as new tensors: a compiled function that reads the module instead shows up here.
    """
    kwargs = dict(kwargs or {})
    twin, twin_inputs = copy.deepcopy(model), fresh((tuple(inputs), kwargs))
    twin_out = twin(*twin_inputs[0], **twin_inputs[1])
    loss(twin_out).backward()

    state, fn = compiled(model, tuple(inputs), kwargs, **options)
    own_inputs, params = fresh((tuple(inputs), kwargs)), fresh(fn.params)
    with unchanged(own_inputs, params, dict(model.named_parameters()), dict(model.named_buffers())):
        state, out = fn(state, params, *own_inputs[0], **own_inputs[1])
    loss(out).backward()

    assert_same(out, twin_out, rtol=rtol, atol=atol, what="output")
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    assert_same({name: params[name].grad for name in expected}, expected, rtol=rtol, atol=atol, what="gradient")
    assert_same(gradients(own_inputs), gradients(twin_inputs), rtol=rtol, atol=atol, what="input gradient")
    buffers = dict(twin.named_buffers())
    held = state.buffers.get(fn.owner, {})
    assert_same({name: held[name] for name in buffers}, buffers, rtol=rtol, atol=atol, what="buffer")
    return state, fn
