"""Transforms that take second derivatives, with vmap inside, outside and between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, vmap
from torch.func import jvp as push

from tests.compose.case import Arguments, Function
from tests.compose.transform import Meets, Transform, transform
from tests.compose.trees import (
    autograd,
    detached,
    everywhere,
    inner,
    leaves_of,
    mapped,
    scalar,
    smooth,
    stacked,
    waves,
    with_first,
)
from tests.helpers import tensors


@transform("double backward", "second")
def double_backward(function: Function, args: Arguments) -> Any:
    own, leaves = leaves_of(args)
    value = scalar(function)(*own)
    first = autograd(value, leaves, create_graph=True)
    return detached(first), autograd(value + inner(first, waves(first)), leaves)


@transform("gradient penalty", "second")
def gradient_penalty(function: Function, args: Arguments) -> Any:
    own, leaves = leaves_of(args)
    value = scalar(function)(*own)
    first = autograd(value, leaves[-1:], create_graph=True)
    (value + (inner(first, first) + 1).sqrt()).backward()
    return [leaf.grad for leaf in leaves]


@transform("autograd of grad", "second", meets=Meets.SOME)
def autograd_of_grad(function: Function, args: Arguments) -> Any:
    own, leaves = leaves_of(args)
    first = grad(scalar(function), argnums=everywhere(args))(*own)
    return autograd(scalar(function)(*own) + inner(first, first), leaves)


@transform("grad of grad", "second")
def grad_of_grad(function: Function, args: Arguments) -> Any:
    slope = grad(scalar(function), argnums=everywhere(args))
    return grad(lambda *own: scalar(slope)(*own) + scalar(function)(*own), argnums=everywhere(args))(*args)


@transform("hessian", "second", "forward")
def hessian_(function: Function, args: Arguments) -> Any:
    return hessian(scalar(function))(*args)


@transform("hessian of the last argument", "second", "forward", meets=Meets.SOME)
def hessian_last(function: Function, args: Arguments) -> Any:
    return hessian(scalar(function), argnums=len(args) - 1)(*args)


@transform("jacrev of jacrev", "second", meets=Meets.SOME)
def jacrev_of_jacrev(function: Function, args: Arguments) -> Any:
    return jacrev(jacrev(scalar(function)))(*args)


@transform("jacrev of jacfwd", "second", "forward", meets=Meets.SOME)
def jacrev_of_jacfwd(function: Function, args: Arguments) -> Any:
    return jacrev(jacfwd(scalar(function)))(*args)


@transform("jacfwd of jacfwd", "second", "forward", meets=Meets.SOME)
def jacfwd_of_jacfwd(function: Function, args: Arguments) -> Any:
    return jacfwd(jacfwd(scalar(function)))(*args)


@transform("hvp forward over reverse", "second", "forward")
def hvp_forward_over_reverse(function: Function, args: Arguments) -> Any:
    return push(grad(scalar(function), argnums=everywhere(args)), args, waves(args))


@transform("hvp reverse over reverse", "second", meets=Meets.SOME)
def hvp_reverse_over_reverse(function: Function, args: Arguments) -> Any:
    slope = with_first(grad(scalar(function)), args)
    value, pull = torch.func.vjp(slope, args[0])
    return value, pull(waves(args[0]))


@transform("hvp reverse over forward", "second", "forward")
def hvp_reverse_over_forward(function: Function, args: Arguments) -> Any:
    along = lambda *own: push(scalar(function), own, waves(args))[1]  # noqa: E731
    return grad(along, argnums=everywhere(args))(*args)


@transform("jvp of jvp", "second", "forward", meets=Meets.SOME)
def jvp_of_jvp(function: Function, args: Arguments) -> Any:
    once = lambda *own: push(smooth(function), own, waves(args))[1]  # noqa: E731
    return push(once, args, waves(args, 3))


@transform("dual numbers of grad", "second", "forward", meets=Meets.SOME)
def dual_numbers_of_grad(function: Function, args: Arguments) -> Any:
    with forward_ad.dual_level():
        duals = mapped(lambda leaf: forward_ad.make_dual(leaf, waves(leaf)), args)
        slopes = tensors(grad(scalar(function))(*duals))
        return [tuple(forward_ad.unpack_dual(slope)) for slope in slopes]


@transform("dual numbers of autograd.grad", "forward", "second", meets=Meets.SOME)
def dual_numbers_of_autograd_grad(function: Function, args: Arguments) -> Any:
    with forward_ad.dual_level():
        own, _ = leaves_of(args)
        duals = mapped(lambda leaf: forward_ad.make_dual(leaf, waves(leaf)), own)
        slopes = autograd(scalar(function)(*duals), tensors(duals), create_graph=True)
        return detached([tuple(forward_ad.unpack_dual(slope)) for slope in slopes])


@transform("vmap of hessian", "batched", "second", "forward", meets=Meets.SOME)
def vmap_of_hessian(function: Function, args: Arguments) -> Any:
    return vmap(hessian(scalar(function)))(*stacked(args))


@transform("vmap of jvp of grad", "batched", "second", "forward")
def vmap_of_jvp_of_grad(function: Function, args: Arguments) -> Any:
    return vmap(lambda *own: push(grad(scalar(function)), own, waves(args)))(*stacked(args))


@transform("grad of vmap of grad", "batched", "second")
def grad_of_vmap_of_grad(function: Function, args: Arguments) -> Any:
    slopes = vmap(grad(scalar(function), argnums=everywhere(args)))
    return grad(lambda *own: scalar(slopes)(*own))(*stacked(args))


@transform("jvp of vmap of grad", "batched", "second", "forward", meets=Meets.SOME)
def jvp_of_vmap_of_grad(function: Function, args: Arguments) -> Any:
    batched = stacked(args)
    return push(vmap(grad(scalar(function))), batched, waves(batched))


@transform("vmap of vmap of grad", "batched", meets=Meets.SOME)
def vmap_of_vmap_of_grad(function: Function, args: Arguments) -> Any:
    return vmap(vmap(grad(scalar(function))), in_dims=1)(*stacked(stacked(args)))


SECOND_ORDER: tuple[Transform, ...] = (
    double_backward, gradient_penalty, autograd_of_grad, grad_of_grad, hessian_, hessian_last, jacrev_of_jacrev,
    jacrev_of_jacfwd, jacfwd_of_jacfwd, hvp_forward_over_reverse, hvp_reverse_over_reverse, hvp_reverse_over_forward,
    jvp_of_jvp, dual_numbers_of_grad, dual_numbers_of_autograd_grad, vmap_of_hessian, vmap_of_jvp_of_grad,
    grad_of_vmap_of_grad, jvp_of_vmap_of_grad, vmap_of_vmap_of_grad,
)  # fmt: skip
