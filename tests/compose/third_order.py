"""Transforms that take third derivatives."""

from __future__ import annotations

from typing import Any

from torch.func import grad, hessian, jacfwd, jacrev, vmap
from torch.func import jvp as push

from tests.compose.case import Arguments, Function
from tests.compose.transform import Meets, Transform, transform
from tests.compose.trees import autograd, detached, inner, leaves_of, scalar, smooth, stacked, waves, with_first


@transform("jacfwd of jacrev of jacrev", "second", "forward", meets=Meets.DEEP)
def jacfwd_of_jacrev_of_jacrev(function: Function, args: Arguments) -> Any:
    return jacfwd(jacrev(jacrev(scalar(function))))(*args)


@transform("jacrev of hessian", "second", "forward", meets=Meets.DEEP)
def jacrev_of_hessian(function: Function, args: Arguments) -> Any:
    return jacrev(hessian(scalar(function)))(*args)


@transform("grad of grad of grad", "second", meets=Meets.DEEP)
def grad_of_grad_of_grad(function: Function, args: Arguments) -> Any:
    directional = lambda value: lambda first: inner(grad(value)(first), waves(first))  # noqa: E731
    along = directional(directional(with_first(scalar(function), args)))
    return grad(along)(args[0])


@transform("jvp of jvp of jvp", "second", "forward", meets=Meets.DEEP)
def jvp_of_jvp_of_jvp(function: Function, args: Arguments) -> Any:
    along = lambda value: lambda *own: push(value, own, waves(args))[1]  # noqa: E731
    return along(along(along(smooth(function))))(*args)


@transform("vmap of jvp of grad of grad", "batched", "second", "forward", meets=Meets.DEEP)
def vmap_of_jvp_of_grad_of_grad(function: Function, args: Arguments) -> Any:
    def bend(first: Any) -> Any:
        return grad(lambda own: scalar(grad(scalar(function)))(own, *args[1:]))(first)

    return vmap(lambda first: push(bend, (first,), (waves(first),)))(stacked(args[0]))


@transform("triple backward", "second", meets=Meets.DEEP)
def triple_backward(function: Function, args: Arguments) -> Any:
    own, leaves = leaves_of(args)
    value, found = scalar(function)(*own), []
    for _ in range(3):
        found.append(autograd(value, leaves, create_graph=True))
        value = value + inner(found[-1], waves(found[-1]))
    return detached(found)


THIRD_ORDER: tuple[Transform, ...] = (
    jacfwd_of_jacrev_of_jacrev, jacrev_of_hessian, grad_of_grad_of_grad,
    jvp_of_jvp_of_jvp, vmap_of_jvp_of_grad_of_grad, triple_backward,
)  # fmt: skip
