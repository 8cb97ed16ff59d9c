"""Custom autograd.Functions whose backward is not the derivative of their forward, in both styles."""

from __future__ import annotations

from typing import Any

import torch


class SavesInputs(torch.autograd.Function):
    """What Functions have in common whose backward reads their inputs."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: Any) -> None:
        ctx.save_for_backward(*inputs)


class Surrogate(SavesInputs):
    """The sign, with the derivative of tanh: no differentiation of the forward finds it, at any order."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2)


class ForwardSurrogate(Surrogate):
    """`Surrogate` with a rule for forward mode that agrees with its backward."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return tangent * (1 - x.tanh() ** 2)


class ContextSurrogate(torch.autograd.Function):
    """`Surrogate` in the older style, where forward takes the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2)


class StraightThrough(torch.autograd.Function):
    """Rounds; passes the gradient three times on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class SavedOutput(torch.autograd.Function):
    """The exponential; its backward uses the saved output and an input, and has a factor of two too many."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x * scale).exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale, output = ctx.saved_tensors
        return gradient * output * scale * 2, gradient * output * x


class TwoOutputs(SavesInputs):
    """Sine and cosine; the backward mixes both gradients in a way of its own."""

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return first * x**2 - second * x**3


class WithIndex(torch.autograd.Function):
    """Values in order and where they came from: the second output has no gradient."""

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = x.sort()
        return found.values, found.indices

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        x, indices = ctx.saved_tensors
        return torch.zeros_like(x).scatter(0, indices, gradient * x.exp().gather(0, indices))


class Outer(SavesInputs):
    """The square; its backward calls `Surrogate`, so the second derivative is that one's backward."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * Surrogate.apply(x * 2)
