"""Transforms that take one derivative, by torch.func and by torch.autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from tests.compose.case import Arguments, Function
from tests.compose.transform import Meets, Transform, transform
from tests.compose.trees import (
    autograd,
    detached,
    everywhere,
    leaves_of,
    mapped,
    scalar,
    smooth,
    waves,
)


@transform("call")
def call(function: Function, args: Arguments) -> Any:
    return function(*args)


@transform("grad")
def grad(function: Function, args: Arguments) -> Any:
    return torch.func.grad(scalar(function), argnums=everywhere(args))(*args)


@transform("grad with aux", meets=Meets.SOME)
def grad_with_aux(function: Function, args: Arguments) -> Any:
    def pair(*own: Any) -> tuple[torch.Tensor, Any]:
        out = function(*own)
        return scalar(lambda: out)(), out

    return torch.func.grad(pair, has_aux=True)(*args)


@transform("grad and value", meets=Meets.SOME)
def grad_and_value(function: Function, args: Arguments) -> Any:
    return torch.func.grad_and_value(scalar(function), argnums=everywhere(args))(*args)


@transform("vjp")
def vjp(function: Function, args: Arguments) -> Any:
    out, pull = torch.func.vjp(smooth(function), *args)
    return out, pull(waves(out))


@transform("jvp", "forward")
def jvp(function: Function, args: Arguments) -> Any:
    return torch.func.jvp(smooth(function), args, waves(args))


@transform("jvp of the first argument", "forward", meets=Meets.SOME)
def jvp_first(function: Function, args: Arguments) -> Any:
    return torch.func.jvp(lambda first: smooth(function)(first, *args[1:]), args[:1], waves(args[:1]))


@transform("linearize", "forward", meets=Meets.SOME)
def linearize(function: Function, args: Arguments) -> Any:
    out, push = torch.func.linearize(smooth(function), *args)
    return out, push(*waves(args)), push(*waves(args, 5))


@transform("jacrev")
def jacrev(function: Function, args: Arguments) -> Any:
    return torch.func.jacrev(smooth(function), argnums=everywhere(args))(*args)


@transform("jacrev in chunks", meets=Meets.SOME)
def jacrev_in_chunks(function: Function, args: Arguments) -> Any:
    return torch.func.jacrev(smooth(function), chunk_size=2)(*args)


@transform("jacfwd", "forward")
def jacfwd(function: Function, args: Arguments) -> Any:
    return torch.func.jacfwd(smooth(function), argnums=everywhere(args))(*args)


@transform("autograd.grad")
def autograd_grad(function: Function, args: Arguments) -> Any:
    own, leaves = leaves_of(args)
    return torch.autograd.grad(scalar(function)(*own), leaves, allow_unused=True)


@transform("backward", meets=Meets.SOME)
def backward(function: Function, args: Arguments) -> Any:
    own, leaves = leaves_of(args)
    scalar(function)(*own).backward()
    return [leaf.grad for leaf in leaves]


@transform("dual numbers", "forward")
def dual_numbers(function: Function, args: Arguments) -> Any:
    with forward_ad.dual_level():
        duals = tuple(
            torch.utils._pytree.tree_map(forward_ad.make_dual, one, waves(one, seed)) for seed, one in enumerate(args)
        )
        return [tuple(forward_ad.unpack_dual(leaf)) for leaf in smooth(function)(*duals)]


@transform("dual numbers over leaves", "forward", meets=Meets.SOME)
def dual_numbers_over_leaves(function: Function, args: Arguments) -> Any:
    with forward_ad.dual_level():
        own, leaves = leaves_of(args)
        duals = mapped(lambda leaf: forward_ad.make_dual(leaf, waves(leaf)), own)
        primal, tangent = forward_ad.unpack_dual(scalar(function)(*duals))
        return detached((primal, tangent)), autograd(primal, leaves)


FIRST_ORDER: tuple[Transform, ...] = (
    call, grad, grad_with_aux, grad_and_value, vjp, jvp, jvp_first, linearize, jacrev, jacrev_in_chunks, jacfwd,
    autograd_grad, backward, dual_numbers, dual_numbers_over_leaves,
)  # fmt: skip
