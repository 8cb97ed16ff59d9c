"""PyTorch's own opinion: its differentiable operations, compiled once, agree with eager in a call and a transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.compose_ops.op_lists import EAGER_CANNOT, SKIPS
from tests.compose_ops.op_samples import Sample, differentiable_operations, sample_of
from tests.helpers import compiled

Function = Callable[..., Sequence[torch.Tensor]]

OPERATIONS = differentiable_operations()
COVERED = [name for name in OPERATIONS if name not in SKIPS]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    *(
        pytest.mark.filterwarnings(f"ignore:{message}")
        for message in (
            # torch's own forward mode uses it where it is first asked for.
            "`torch.jit.script` is deprecated:DeprecationWarning",
            # vmap runs an operation once for each example, in eager as well.
            "There is a performance drop because we have not yet implemented the batching rule:UserWarning",
            # Operations, or ways to call one, that are deprecated, are new or want to be called otherwise.
            r"torch\.(cholesky|lu|lu_solve|qr|triangular_solve) is deprecated:UserWarning",
            r"Using torch\.cross without specifying the dim arg:UserWarning",
            "A window was not provided:UserWarning",
            r"`nn\.functional\.upsample_(bilinear|nearest)` is deprecated:UserWarning",
            r"index_reduce\(\) is in beta:UserWarning",
            "The reduce argument of torch.scatter with Tensor src is deprecated:UserWarning",
            "ComplexHalf support is experimental:UserWarning",
            "dropout2d. Received a 3D input:UserWarning",
            # The batched backward of logsigmoid resizes a buffer of torch's own.
            "An output with one or more elements was resized:UserWarning",
        )
    ),
]


def call(function: Function, sample: Sample) -> Any:
    """The function at other numbers than those it was compiled with."""
    return function(*(tensor * (15 / 16) for tensor in sample.inputs))


def vjp(function: Function, sample: Sample) -> Any:
    """The outputs, and the gradients of the inputs for a random cotangent."""
    of_chosen, chosen = of_differentiable(function, sample)
    outputs, pull = torch.func.vjp(of_chosen, *chosen)
    return outputs, pull(random_like(outputs, seed=1))


def jvp(function: Function, sample: Sample) -> Any:
    """The outputs, and their derivatives along random tangents."""
    of_chosen, chosen = of_differentiable(function, sample)
    return torch.func.jvp(of_chosen, chosen, random_like(chosen, seed=2))


def vmap(function: Function, sample: Sample) -> Any:
    """The outputs for a batch of two."""
    return torch.func.vmap(function)(*(torch.stack([tensor, tensor * (15 / 16)]) for tensor in sample.inputs))


def vmap_of_vjp(function: Function, sample: Sample) -> Any:
    """The gradients of two samples for one random cotangent."""
    of_chosen, chosen = of_differentiable(function, sample)
    cotangents = random_like(of_chosen(*chosen), seed=1)

    def gradients(*own: torch.Tensor) -> Any:
        return torch.func.vjp(of_chosen, *own)[1](cotangents)

    return torch.func.vmap(gradients)(*(torch.stack([tensor, tensor * (15 / 16)]) for tensor in chosen))


def vjp_of_each(function: Function, sample: Sample) -> Any:
    """What `vmap_of_vjp` gives, one sample after the other."""
    of_chosen, chosen = of_differentiable(function, sample)
    cotangents = random_like(of_chosen(*chosen), seed=1)
    rows = [torch.func.vjp(of_chosen, *(tensor * scale for tensor in chosen))[1](cotangents) for scale in (1, 15 / 16)]
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


def of_differentiable(function: Function, sample: Sample) -> tuple[Function, tuple[torch.Tensor, ...]]:
    """The function of the differentiable inputs alone that gives the floating outputs alone, and these inputs."""

    def of_chosen(*chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = dict(enumerate(sample.inputs)) | dict(zip(sample.differentiable, chosen, strict=True))
        return tuple(one for one in function(*inputs.values()) if one.is_floating_point() or one.is_complex())

    return of_chosen, tuple(sample.inputs[i] for i in sample.differentiable)


def random_like(tensors: Sequence[torch.Tensor], *, seed: int) -> tuple[torch.Tensor, ...]:
    """Random tensors of the same shapes and dtypes."""
    source = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(one.shape, dtype=one.dtype, generator=source) for one in tensors)


def assert_agrees(name: str, function: Function, sample: Sample) -> None:
    """The function does what the sample's own does, as it is and under each transform that eager knows."""
    for run in (call, vjp, vmap, jvp):
        how, names = EAGER_CANNOT.get(run.__name__, ("", ()))
        if name in names:
            with pytest.raises(RuntimeError, match=how):
                run(sample.function, sample)
            continue
        expected = run(sample.function, sample)
        assert_close(run(function, sample), expected, f"{name}, {run.__name__}")


def assert_close(ours: Any, expected: Any, what: str) -> None:
    """Equal within the tolerance of float64; NaN equals NaN."""
    torch.testing.assert_close(ours, expected, equal_nan=True, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("name", COVERED)
def test_operation_agrees_with_eager(name: str) -> None:
    sample = sample_of(OPERATIONS[name])
    assert sample, "no useful sample"
    state, fn = compiled(sample.function, sample.inputs)
    assert_agrees(name, lambda *tensors: fn(state, *tensors)[1], sample)
    if name not in EAGER_CANNOT["vjp"][1]:  # eager's own vmap of a backward is wrong or missing for some
        ours = vmap_of_vjp(lambda *tensors: fn(state, *tensors)[1], sample)
        assert_close(ours, vjp_of_each(sample.function, sample), f"{name}, vmap of vjp")
    assert fn.cache_info().eager_calls == 0


def test_eager_agrees_with_itself() -> None:
    for name in COVERED:
        sample = sample_of(OPERATIONS[name])
        assert sample, f"no useful sample of {name}"
        assert_agrees(name, sample.function, sample)


def test_lists_name_operations_and_most_are_covered() -> None:
    named = {*SKIPS, *(name for _, names in EAGER_CANNOT.values() for name in names)}
    assert named <= OPERATIONS.keys()
    assert len(COVERED) >= 150
