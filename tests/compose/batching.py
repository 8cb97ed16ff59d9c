"""Transforms with vmap, and with first derivatives inside, outside and through it."""

from __future__ import annotations

from typing import Any

import torch

from tests.compose.case import Arguments, Function
from tests.compose.transform import Meets, Transform, transform
from tests.compose.trees import autograd, everywhere, leaves_of, scalar, smooth, stacked, waves


def _rest_batched(args: Arguments) -> tuple[Arguments, tuple[int | None, ...]]:
    """The arguments with all but the first stacked, and the in_dims; a lone argument is stacked too."""
    if len(args) == 1:
        return stacked(args), (0,)
    return (args[0], *stacked(args[1:])), (None, *(0,) * (len(args) - 1))


@transform("vmap", "batched")
def vmap(function: Function, args: Arguments) -> Any:
    return torch.func.vmap(function)(*stacked(args))


@transform("vmap of the rest", "batched")
def vmap_rest(function: Function, args: Arguments) -> Any:
    batched, in_dims = _rest_batched(args)
    return torch.func.vmap(function, in_dims)(*batched)


@transform("vmap of the last dimension", "batched")
def vmap_last(function: Function, args: Arguments) -> Any:
    return torch.func.vmap(function, in_dims=-1, out_dims=-1)(*stacked(args, -1))


@transform("vmap in chunks", "batched", meets=Meets.SOME)
def vmap_in_chunks(function: Function, args: Arguments) -> Any:
    return torch.func.vmap(function, chunk_size=2)(*stacked(args))


@transform("vmap with randomness", "batched", meets=Meets.SOME)
def vmap_with_randomness(function: Function, args: Arguments) -> Any:
    return [torch.func.vmap(function, randomness=kind)(*stacked(args)) for kind in ("same", "different")]


@transform("nested vmap", "batched")
def nested_vmap(function: Function, args: Arguments) -> Any:
    return torch.func.vmap(torch.func.vmap(function), in_dims=1, out_dims=1)(*stacked(stacked(args)))


@transform("crossed vmap", "batched", meets=Meets.SOME)
def crossed_vmap(function: Function, args: Arguments) -> Any:
    batched, in_dims = _rest_batched(args)
    first = (0, *(None,) * (len(args) - 1))
    if len(args) == 1:
        return torch.func.vmap(function)(*batched)
    return torch.func.vmap(torch.func.vmap(function, in_dims), first)(stacked(args[0]), *batched[1:])


@transform("ensemble", "batched", meets=Meets.SOME)
def ensemble(function: Function, args: Arguments) -> Any:
    return torch.func.vmap(function, (0, *(None,) * (len(args) - 1)))(stacked(args[0]), *args[1:])


@transform("ensemble gradients", "batched")
def ensemble_gradients(function: Function, args: Arguments) -> Any:
    step = torch.func.grad_and_value(scalar(function))
    return torch.func.vmap(step, (0, *(None,) * (len(args) - 1)))(stacked(args[0]), *args[1:])


@transform("per-sample gradients", "batched")
def per_sample_gradients(function: Function, args: Arguments) -> Any:
    batched, in_dims = _rest_batched(args)
    return torch.func.vmap(torch.func.grad(scalar(function)), in_dims, chunk_size=2)(*batched)


@transform("grad of vmap", "batched")
def grad_of_vmap(function: Function, args: Arguments) -> Any:
    batched, in_dims = _rest_batched(args)
    total = scalar(torch.func.vmap(function, in_dims))
    return torch.func.grad(total, argnums=everywhere(args))(*batched)


@transform("autograd of vmap", "batched", meets=Meets.SOME)
def autograd_of_vmap(function: Function, args: Arguments) -> Any:
    own, leaves = leaves_of(stacked(args))
    return autograd(scalar(torch.func.vmap(function))(*own), leaves)


@transform("vmap of vjp", meets=Meets.SOME)
def vmap_of_vjp(function: Function, args: Arguments) -> Any:
    out, pull = torch.func.vjp(smooth(function), *args)
    return torch.func.vmap(pull)(stacked(waves(out)))


@transform("vmap of jvp", "forward")
def vmap_of_jvp(function: Function, args: Arguments) -> Any:
    push = torch.func.vmap(lambda *tangents: torch.func.jvp(smooth(function), args, tangents))
    return push(*stacked(waves(args)))


@transform("jvp of vmap", "batched", "forward", meets=Meets.SOME)
def jvp_of_vmap(function: Function, args: Arguments) -> Any:
    batched = stacked(args)
    return torch.func.jvp(torch.func.vmap(smooth(function)), batched, waves(batched))


BATCHING: tuple[Transform, ...] = (
    vmap, vmap_rest, vmap_last, vmap_in_chunks, vmap_with_randomness, nested_vmap, crossed_vmap, ensemble,
    ensemble_gradients, per_sample_gradients, grad_of_vmap, autograd_of_vmap, vmap_of_vjp, vmap_of_jvp, jvp_of_vmap,
)  # fmt: skip
