"""The training run as values: what one step changes, and the step that gives the next such value."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import scoped_fn as sf
from scoped_fn.demo.adamw import Moments, Tensors, adamw, init_moments
from scoped_fn.demo.gpt import GPT
from scoped_fn.demo.options import TrainOptions
from scoped_fn.demo.precision import first_state
from scoped_fn.demo.text import Corpus, training_batch, validation_batches

Step = Callable[..., tuple[sf.CompilerState, tuple[Tensor, Tensors]]]

PEAK_LEARNING_RATE = 4e-3
WARM_UP_STEPS = 100
VALIDATION_BATCHES = 10
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Carry:
    """All that a training step changes.

    Attributes:
        state: The compiler's state, in the scope of the recipe where there is one; with its scales, if it keeps any.
        params: The model's parameters by name.
        moments: The optimizer's moments.
        losses: The loss of each step so far, in nats a byte.
    """

    state: sf.CompilerState
    params: Tensors
    moments: Moments
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Engine:
    """A compiled model.

    Attributes:
        model: The module it was compiled from, never written to.
        loss: ``(state, params, tokens, targets) -> (state, loss)``, the inference graph.
        step: ``(state, params, tokens, targets) -> (state, (loss, grads))``, the joint graph.
        compile_s: Seconds that compiling took.
    """

    model: GPT
    loss: Any
    step: Step
    compile_s: float


def build_engine(options: TrainOptions, corpus: Corpus) -> tuple[Carry, Engine]:
    """Returns the run before its first step, and the model compiled for validation and for training."""
    model = GPT(options.model, seed=options.seed)
    batch = first_batch(options, corpus)
    started = time.perf_counter()
    with torch.no_grad():  # without gradients `compile` builds the inference graph
        state = first_state(options.seed, options.recipe)
        state, loss = sf.compile(state, model, batch, backend=options.backend, name="gpt")
    step = sf.value_and_grad(loss)
    params = {name: value.detach().clone() for name, value in loss.params.items()}
    step(state, params, *batch)  # the joint graph compiles at its first call; what the call returns is not needed
    compile_s = time.perf_counter() - started
    return Carry(state, params, init_moments(params), ()), Engine(model, loss, step, compile_s)


def first_batch(options: TrainOptions, corpus: Corpus) -> tuple[Tensor, Tensor]:
    """Returns the tokens and targets of the first step, each (B, T)."""
    return training_batch(corpus, seed=options.seed, step=0, batch=options.batch, context=options.model.context)


def learning_rate(step: int) -> float:
    """Returns the rate of a step, counted from 0: a linear warm-up, then a fall with the root of the step.

    It does not depend on the length of the run, so a resumed run continues as if it had never stopped.
    """
    number = step + 1
    return PEAK_LEARNING_RATE * min(number / WARM_UP_STEPS, math.sqrt(WARM_UP_STEPS / number))


def train(carry: Carry, step: Step, corpus: Corpus, options: TrainOptions) -> Iterator[Carry]:
    """Yields the run after each of its remaining steps; every value yielded stays valid."""
    for number in range(len(carry.losses), options.steps):
        batch = training_batch(
            corpus, seed=options.seed, step=number, batch=options.batch, context=options.model.context
        )
        state, (loss, grads) = step(carry.state, carry.params, *batch)
        moments, params = adamw(carry.moments, carry.params, grads, learning_rate=learning_rate(number))
        carry = Carry(state, params, moments, (*carry.losses, loss.item()))
        yield carry


def validate(carry: Carry, engine: Engine, corpus: Corpus, options: TrainOptions) -> float:
    """Returns the mean loss in nats a byte over evenly spread parts of the validation text."""
    context = options.model.context
    batches = validation_batches(corpus, count=VALIDATION_BATCHES, batch=options.batch, context=context)
    with torch.no_grad():
        losses = [engine.loss(carry.state, carry.params, *batch)[1].item() for batch in batches]
    return float(sum(losses) / len(losses))


def sample(carry: Carry, engine: Engine, options: TrainOptions, *, length: int) -> bytes:
    """Returns bytes that the model writes after a line break."""
    generator = torch.Generator().manual_seed(options.seed)
    tokens = torch.tensor([[ord("\n")]])
    with torch.no_grad():
        for _ in range(length):
            seen = tokens[:, -options.model.context :]
            logits = functional_call(engine.model, carry.params, (seen,))[:, -1]
            probabilities = (logits / TEMPERATURE).softmax(dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return bytes(tokens[0, 1:].tolist())
