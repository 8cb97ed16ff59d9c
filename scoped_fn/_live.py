"""The model's own Python code, run on other tensors than its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from scoped_fn._ambient import Ambient
from scoped_fn._elementary import Elementary
from scoped_fn._frozen_module import replace_tensors
from scoped_fn._random.graph import KEY
from scoped_fn._random.rules import KeyedMode
from scoped_fn._random.words import keys_of
from scoped_fn._source import Source, buffer_places
from scoped_fn._structure import Structure, flatten, unflatten
from scoped_fn.random import fold_in


def copy_with(
    source: Source, structure: Structure, given: Sequence[torch.Tensor]
) -> tuple[Callable[[], Any], torch.nn.Module | None]:
    """Returns the model's call with its parameters, buffers and inputs replaced, and the copy of it that is called.

    Args:
        source: The model.
        structure: Structure of the inputs.
        given: Parameters, buffers and input tensors.
    """
    own = [*source.params.values(), *source.buffers.values()]
    args, kwargs = unflatten(structure, list(given[len(own) :]))
    if not isinstance(source.call, torch.nn.Module):
        return partial(source.call, *args, **kwargs), None
    model = replace_tensors(source.call, {id(tensor): new for tensor, new in zip(own, given, strict=False)})
    return partial(model, *args, **kwargs), model


def buffers_after(source: Source, model: torch.nn.Module) -> dict[str, Any]:
    """Returns the buffers of a copy of the model."""
    places = buffer_places(model, source.buffers)
    return {name: getattr(module, leaf) for name, (module, leaf) in zip(source.buffers, places, strict=True)}


@dataclass(frozen=True, eq=False)
class Live:
    """A model as a pure function of the placeholders of its captured graph.

    It takes the place of the graph where that does not say everything: a graph has one order of derivatives of a custom
    `autograd.Function`, and transforms inside the model are recorded with the numbers of their levels.

    Attributes:
        source: The model.
        structure: Structure of the inputs. If a key follows them, random operations draw from it.
        num_constants: How many constants lie between buffers and inputs; the code finds its own.
        changed: Names of the buffers that come back, in order; the next key may follow them.
        ambient: The torch settings that the model was captured under.
    """

    source: Source
    structure: Structure
    num_constants: int
    changed: tuple[str, ...]
    ambient: Ambient

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Returns the model's own results, then the new buffers."""
        params, held = len(self.source.params), len(self.source.params) + len(self.source.buffers)
        buffers = [buffer.clone() for buffer in tensors[params:held]]
        inputs = tensors[held + self.num_constants :]
        words = inputs[self.structure.num_tensors] if self.structure.keyed else None
        call, model = copy_with(self.source, self.structure, [*tensors[:params], *buffers, *inputs])
        with self.ambient.restored(), Elementary(), _draws_from(words):
            results = flatten(call(), "outputs")[0]
        after = buffers_after(self.source, model) if model is not None else {}
        if words is not None:
            after[KEY] = keys_of(words, 1)[0]
        return [*results, *(after[name] for name in self.changed)]


def _draws_from(words: torch.Tensor | None) -> AbstractContextManager[Any]:
    """Lets the i-th random operation draw from key i + 1 of those that the graph splits off."""
    if words is None:
        return nullcontext()
    return KeyedMode(lambda i: fold_in(words, i + 1))
