"""Trees of tensors for transforms: scalars of a result, tangents, stacks. All values depend on shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from tests.compose.case import Arguments, Function
from tests.helpers import tensors

COPIES = 3


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether the dtype has derivatives."""
    return tensor.is_floating_point() or tensor.is_complex()


def floats(tree: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a tree that can carry a derivative."""
    return tuple(tensor for tensor in tensors(tree) if is_differentiable(tensor))


def smooth(function: Function) -> Function:
    """The function without results that have no derivative."""
    return lambda *args: floats(function(*args))


def wave(like: torch.Tensor, seed: int) -> torch.Tensor:
    """A tensor of this shape and dtype with values between -1 and 1 that differ from place to place."""
    angles = torch.arange(like.numel(), dtype=torch.float64).view(like.shape) + 0.7 * seed + 0.3
    made = torch.complex(angles.cos(), angles.sin()) if like.is_complex() else angles.cos()
    return made.to(like.dtype)


def weigh(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """One number that treats every element differently, and not linearly."""
    mixed = (wave(tensor, seed) * tensor + 0.5 * tensor * tensor).sum()
    return (mixed.real + 2 * mixed.imag if mixed.is_complex() else mixed).double()


def scalar(function: Function) -> Function:
    """The function reduced to one float64 number in which every differentiable result has a part."""
    return lambda *args: sum(weigh(tensor, seed) for seed, tensor in enumerate(floats(function(*args))))


def waves(tree: Any, seed: int = 0) -> Any:
    """A tangent or cotangent for each tensor of the tree."""
    leaves, structure = torch_pytree.tree_flatten(tree)
    made = [wave(leaf, seed + position) for position, leaf in enumerate(leaves)]
    return torch_pytree.tree_unflatten(made, structure)


def stacked(tree: Any, dim: int = 0) -> Any:
    """The tree with different copies of each tensor along a new dimension; what is zero stays zero."""
    return mapped(lambda leaf: torch.stack([leaf * (1 + 0.2 * i) for i in range(COPIES)], dim), tree)


def mapped(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The tree with the function of each leaf."""
    return torch_pytree.tree_map(function, tree)


def inner(left: Any, right: Any) -> torch.Tensor:
    """The real inner product of two trees."""
    pairs = zip(tensors(left), tensors(right), strict=True)
    return sum(((one.conj() * other).sum().real.double() for one, other in pairs), torch.zeros((), dtype=torch.float64))


def leaves_of(args: Arguments) -> tuple[Arguments, list[torch.Tensor]]:
    """The arguments as autograd leaves that require gradients, in their trees and as a list."""
    made = mapped(lambda leaf: leaf.detach().clone().requires_grad_(), args)
    return made, tensors(made)


def autograd(value: torch.Tensor, leaves: list[torch.Tensor], *, create_graph: bool = False) -> list[Any]:
    """The gradients by torch.autograd, zeros for what the value does not depend on."""
    return list(torch.autograd.grad(value, leaves, create_graph=create_graph, materialize_grads=True))


def detached(tree: Any) -> Any:
    """The tree off autograd's graph."""
    return mapped(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)


def everywhere(args: Arguments) -> tuple[int, ...]:
    """The argument numbers of all arguments."""
    return tuple(range(len(args)))


def with_first(function: Function, args: Arguments) -> Function:
    """The function of its first argument alone."""
    return lambda first: function(first, *args[1:])
