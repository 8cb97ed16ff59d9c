"""The training run as values: what one step changes, and the step that gives the next such value."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call

import scoped_fn as sf
from scoped_fn.demo.adamw import Moments, Tensors, adamw, init_moments
from scoped_fn.demo.changes import (
    Batch,
    Change,
    Footprint,
    advance_on,
    footprint_of,
    plain_footprint,
    remarks_of_passes,
)
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
        compile_s: Seconds that compiling took, before the first step.
        plain: What a step needs without passes; None where there is no schedule.
        changes: The entries of the schedule that came into force, in order.
    """

    model: GPT
    loss: sf.CompiledFn
    step: Step
    compile_s: float
    plain: Footprint | None = None
    changes: tuple[Change, ...] = ()


def build_engine(options: TrainOptions, corpus: Corpus, *, first_step: int = 0) -> tuple[Carry, Engine]:
    """Returns the run before its first step, and the model compiled for validation and for training.

    Args:
        options: The run's options.
        corpus: Its text.
        first_step: The step to be made first, counted from 0: its entry of the schedule is in force.
    """
    model, batch = GPT(options.model, seed=options.seed), _batch(first_step, corpus, options)
    started = time.perf_counter()
    listener: AbstractContextManager[list[str]] = remarks_of_passes() if options.schedule else nullcontext([])
    with listener as remarks:
        state, loss = _compiled_loss(model, batch, options, first_step)
        params = {name: value.detach().clone() for name, value in loss.params.items()}
        step = _compiled_step(state, params, loss, batch)
    engine = Engine(model, loss, step, time.perf_counter() - started)
    carry = Carry(state, params, init_moments(params), ())
    if options.schedule is None:
        return carry, engine
    engine = replace(engine, plain=plain_footprint(state, loss, batch))
    if loss.entry is None:
        return carry, engine
    change = Change(first_step, options.schedule.words[loss.entry], engine.compile_s, tuple(remarks))
    return _with_change(carry, engine, change)


def due_passes(carry: Carry, engine: Engine, options: TrainOptions) -> str | None:
    """Returns the words of the passes that come into force with the next step; None where nothing changes."""
    schedule = options.schedule
    due = None if schedule is None else schedule.schedule.due(len(carry.losses))
    return None if schedule is None or due is None or due == engine.loss.entry else schedule.words[due]


def advance_engine(carry: Carry, engine: Engine, corpus: Corpus, options: TrainOptions) -> tuple[Carry, Engine]:
    """Returns the run and the model for the next step: the very same where nothing comes into force."""
    number, passes = len(carry.losses), due_passes(carry, engine, options)
    if passes is None:
        return carry, engine
    batch, started = _batch(number, corpus, options), time.perf_counter()
    with remarks_of_passes() as remarks:
        state, loss = advance_on(carry.state, engine.loss, number, batch)
        step = _compiled_step(state, carry.params, loss, batch)
    change = Change(number, passes, time.perf_counter() - started, tuple(remarks))
    return _with_change(replace(carry, state=state), replace(engine, loss=loss, step=step), change)


def first_batch(options: TrainOptions, corpus: Corpus) -> Batch:
    """Returns the tokens and targets of the first step, each (B, T)."""
    return _batch(0, corpus, options)


def _batch(step: int, corpus: Corpus, options: TrainOptions) -> Batch:
    return training_batch(corpus, seed=options.seed, step=step, batch=options.batch, context=options.model.context)


def _compiled_loss(
    model: GPT, batch: Batch, options: TrainOptions, first_step: int
) -> tuple[sf.CompilerState, sf.CompiledFn]:
    schedule = None if options.schedule is None else options.schedule.schedule
    state = first_state(options.seed, options.recipe)
    with torch.no_grad():  # without gradients `compile` builds the inference graph
        state, loss = sf.compile(state, model, batch, backend=options.backend, schedule=schedule, name="gpt")
    return (state, loss) if schedule is None else advance_on(state, loss, first_step, batch)


def _compiled_step(state: sf.CompilerState, params: Tensors, loss: sf.CompiledFn, batch: Batch) -> Step:
    step = sf.value_and_grad(loss)
    step(state, params, *batch)  # the joint graph compiles at its first call; what the call returns is not needed
    return step


def _with_change(carry: Carry, engine: Engine, change: Change) -> tuple[Carry, Engine]:
    state, footprint = footprint_of(carry.state, engine.loss)
    change = replace(change, footprint=footprint, plain=engine.plain)
    return replace(carry, state=state), replace(engine, changes=(*engine.changes, change))


def learning_rate(step: int) -> float:
    """Returns the rate of a step, counted from 0: a linear warm-up, then a fall with the root of the step.

    It does not depend on the length of the run, so a resumed run continues as if it had never stopped.
    """
    number = step + 1
    return PEAK_LEARNING_RATE * min(number / WARM_UP_STEPS, math.sqrt(WARM_UP_STEPS / number))


def train_step(carry: Carry, step: Step, corpus: Corpus, options: TrainOptions) -> Carry:
    """Returns the run after its next step; the one before stays valid."""
    number = len(carry.losses)
    state, (loss, grads) = step(carry.state, carry.params, *_batch(number, corpus, options))
    moments, params = adamw(carry.moments, carry.params, grads, learning_rate=learning_rate(number))
    return Carry(state, params, moments, (*carry.losses, loss.item()))


def validate(carry: Carry, engine: Engine, corpus: Corpus, options: TrainOptions) -> float:
    """Returns the mean loss in nats a byte over evenly spread parts of the validation text."""
    context = options.model.context
    batches = validation_batches(corpus, count=VALIDATION_BATCHES, batch=options.batch, context=context)
    state, loss = _evaluation(carry, engine, corpus, options)
    with torch.no_grad():
        losses = [loss(state, carry.params, *batch)[1].item() for batch in batches]
    return float(sum(losses) / len(losses))


def _evaluation(
    carry: Carry, engine: Engine, corpus: Corpus, options: TrainOptions
) -> tuple[sf.CompilerState, sf.CompiledFn]:
    """Returns a state and the loss without dropout, with the scales of the run: the run's own where nothing drops."""
    if not options.model.dropout:
        return carry.state, engine.loss
    model, batch = _evaluated_model(engine, options), first_batch(options, corpus)
    with torch.no_grad():
        state, loss = sf.compile(
            first_state(options.seed, options.recipe), model, batch, backend=options.backend, name="gpt-evaluated"
        )
    held = carry.state.fp8.get(engine.loss.owner)
    return state if held is None else replace(state, fp8=state.fp8.set(loss.owner, held)), loss


def _evaluated_model(engine: Engine, options: TrainOptions) -> GPT:
    model = engine.model
    return GPT(replace(options.model, dropout=0.0), seed=options.seed) if options.model.dropout else model


def sample(carry: Carry, engine: Engine, options: TrainOptions, *, length: int) -> bytes:
    """Returns bytes that the model writes after a line break."""
    generator = torch.Generator().manual_seed(options.seed)
    tokens, model = torch.tensor([[ord("\n")]]), _evaluated_model(engine, options)
    with torch.no_grad():
        for _ in range(length):
            seen = tokens[:, -options.model.context :]
            logits = functional_call(model, carry.params, (seen,))[:, -1]
            probabilities = (logits / TEMPERATURE).softmax(dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return bytes(tokens[0, 1:].tolist())
