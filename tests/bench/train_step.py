"""One training step of a four-layer GPT: `value_and_grad` against `torch.compile` and `.backward()`. Bar: 1.0."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import scoped_fn as sf
from scoped_fn.demo.gpt import GPT, GPTConfig
from tests.bench.measure import Row, medians_us, print_table


def model_and_batch() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A GPT of 4 layers and width 128, and a batch of 8 x 128 tokens."""
    config = GPTConfig(layers=4, width=128, context=128)
    tokens = torch.randint(0, config.vocabulary, (8, config.context + 1), generator=torch.Generator().manual_seed(1))
    return GPT(config, seed=0), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def rows() -> list[Row]:
    model, batch = model_and_batch()
    theirs = torch.compile(model, backend="inductor")
    state, fn = sf.compile(sf.init_state(), model, batch)
    step, params = sf.value_and_grad(fn), fn.params

    def their_step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = theirs(*batch)
        loss.backward()
        return loss

    def eager_step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = model(*batch)
        loss.backward()
        return loss

    def autograd_step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = fn(state, params, *batch)[1]
        loss.backward()
        return loss

    _, (value, grads) = step(state, params, *batch)
    torch.testing.assert_close(value, their_step().detach(), rtol=1e-4, atol=1e-4)
    expected = {name: one.grad for name, one in model.named_parameters()}
    torch.testing.assert_close(grads, expected, rtol=1e-3, atol=1e-4)
    times = medians_us(
        {
            "value_and_grad": lambda: step(state, params, *batch),
            "autograd": autograd_step,
            "torch.compile": their_step,
            "eager": eager_step,
        },
        rounds=25,
    )
    bars = [("value_and_grad", "torch.compile", 1.0), ("value_and_grad", "eager", float("inf")),
            ("autograd", "torch.compile", float("inf"))]  # fmt: skip
    return [
        Row(
            f"training step by {ours}, GPT 4 x 128",
            theirs_name,
            f"{times[ours] / 1000:.1f} ms",
            f"{times[theirs_name] / 1000:.1f} ms",
            times[ours] / times[theirs_name],
            bar,
        )
        for ours, theirs_name, bar in bars
    ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
