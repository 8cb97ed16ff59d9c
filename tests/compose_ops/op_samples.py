"""PyTorch's own table of operations, and for each a small sample as a flat function of its float64 tensors."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from torch.utils import _pytree as torch_pytree

MOST_CANDIDATES = 200
MOST_ELEMENTS = 10_000
# The first samples of these cannot be compiled: sizes in a tensor, running statistics that may change.
FIRST = {"_native_batch_norm_legit": 9, "nn.functional.instance_norm": 8, "tensor_split": 4}
# The table sets a random seed around these. Some samples draw no numbers, and then the function itself will do.
SEEDED = (
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout.with_train",
    "nn.functional.feature_alpha_dropout.without_train",
    "nn.functional.scaled_dot_product_attention",
)


@dataclass(frozen=True)
class Sample:
    """A call of an operation.

    Attributes:
        function: Takes the float64 tensors, one argument each, and gives the tensors of the result.
        inputs: The float64 tensors.
        differentiable: The indices of those that the operation has a derivative for.
    """

    function: Callable[..., tuple[torch.Tensor, ...]]
    inputs: tuple[torch.Tensor, ...]
    differentiable: tuple[int, ...]


def differentiable_operations() -> dict[str, Any]:
    """Full name -> entry of the table, of each operation that has a derivative for float64 on the CPU."""
    return {one.full_name: one for one in table() if one.supports_autograd and torch.float64 in one.dtypes}


def table() -> Sequence[Any]:
    """The table, imported so that two settings of the process stay as they are."""
    pytest.importorskip("expecttest", reason="torch's own test tools import it")
    # It would forbid `torch.backends.cudnn.enabled = ...` from then on, and it chooses a hypothesis profile of its own.
    with mock.patch.object(torch.backends, "disable_global_flags"):
        from torch.testing._internal.common_methods_invocations import op_db
    settings.load_profile("repository")
    return op_db


def sample_of(operation: Any) -> Sample | None:
    """The first useful sample of an operation; rather one that has more than one number in an input."""
    found = None
    for sample in samples_of(operation):
        if any(tensor.numel() > 1 for tensor in sample.inputs):
            return sample
        found = found or sample
    return found


def samples_of(operation: Any) -> Iterator[Sample]:
    """The useful samples of an operation, the same on every run."""
    from torch.testing._internal.common_utils import set_rng_seed

    set_rng_seed(zlib.crc32(operation.full_name.encode()))
    candidates = operation.sample_inputs("cpu", torch.float64, requires_grad=True, set_seed=False)
    for candidate in itertools.islice(candidates, FIRST.get(operation.full_name, 0), MOST_CANDIDATES):
        sample = as_sample(operation, candidate)
        if sample and is_repeatable(sample):
            yield sample


def as_sample(operation: Any, candidate: Any) -> Sample | None:
    """The sample in flat form, if it is small, strided and differentiable."""
    leaves, spec = torch_pytree.tree_flatten((candidate.input, candidate.args, candidate.kwargs))
    tensors = {i: leaf.detach() for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    places = [i for i, tensor in tensors.items() if tensor.dtype is torch.float64]
    differentiable = tuple(n for n, i in enumerate(places) if leaves[i].requires_grad)
    if not differentiable or any(tensor.layout is not torch.strided for tensor in tensors.values()):
        return None
    if any(tensors[i].numel() == 0 for i in places) or sum(map(torch.numel, tensors.values())) > MOST_ELEMENTS:
        return None
    fixed = [tensors.get(i, leaf) for i, leaf in enumerate(leaves)]
    call = caller(operation)

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(fixed)
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        first, args, kwargs = torch_pytree.tree_unflatten(filled, spec)
        # The table's own: leaves out what is free in a result, such as the signs of eigenvectors.
        out = candidate.output_process_fn_grad(call(first, *args, **kwargs))
        return tuple(leaf for leaf in torch_pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))

    return Sample(function, tuple(tensors[i] for i in places), differentiable)


def caller(operation: Any) -> Callable[..., Any]:
    """The operation as it is called."""
    if operation.full_name in SEEDED:
        return getattr(F, operation.name.removeprefix("nn.functional."))
    if operation.name.startswith("masked."):  # its wrapper hides what is masked out
        return operation.op
    # The wrapper makes a matrix symmetric, or triangular, where the operation asks for one.
    return lambda *args, **kwargs: operation.gradcheck_wrapper(operation.op, *args, **kwargs)


def is_repeatable(sample: Sample) -> bool:
    """Whether two calls give the same strided tensors, some of them floating, and leave the inputs as they are."""
    before = [tensor.clone() for tensor in sample.inputs]
    once, again = sample.function(*sample.inputs), sample.function(*sample.inputs)
    return (
        all(map(torch.equal, sample.inputs, before))
        and any(tensor.is_floating_point() or tensor.is_complex() for tensor in once)
        and all(tensor.layout is torch.strided for tensor in once)
        and all(torch.allclose(one, two, rtol=0, atol=0, equal_nan=True) for one, two in zip(once, again, strict=True))
    )
