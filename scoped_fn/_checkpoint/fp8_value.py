"""Scales and amax history of an owner from JSON and tensors, checked against their columns and recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scoped_fn import recipes
from scoped_fn._checkpoint.dtypes import described_tensor
from scoped_fn._checkpoint.leaves import FP8_TENSORS
from scoped_fn._checkpoint.plain import Document
from scoped_fn._checkpoint.recipes import recipe_value
from scoped_fn._checkpoint.unfit import Unfit, demand
from scoped_fn.state import Fp8State
from scoped_fn.state.fp8_state import gradients_of

FIELDS = frozenset({"columns", "recipe", *FP8_TENSORS})
ROLES = ("input", "weight", "grad_output")


def fp8_value(document: Document, take: Callable[[Document], torch.Tensor]) -> Fp8State:
    """Returns the scales that JSON stands for."""
    demand(
        isinstance(document, dict) and document.keys() == FIELDS, f"scales with {', '.join(sorted(FIELDS))}", document
    )
    columns, recipe = _columns(document["columns"]), recipe_value(document["recipe"])
    demand(isinstance(recipe, recipes.WithHistory), "a recipe that keeps a history", recipe)
    tensors = {name: take(document[name]) for name in FP8_TENSORS}
    count, sinks = len(columns), len(gradients_of(columns))
    shapes = {"scale": [count], "amax_history": [recipe.amax_history_len, count], "grad_sink": [sinks]}
    for name, shape in shapes.items():
        found = tensors[name]
        if found.dtype != torch.float32 or list(found.shape) != shape:
            raise Unfit(f"{name} of FP8 as float32{shape}", described_tensor(found))
    return Fp8State(columns, recipe, tensors["scale"], tensors["amax_history"], tensors["grad_sink"])


def _columns(content: Any) -> tuple[tuple[str, str], ...]:
    well = isinstance(content, list) and all(_is_column(each) for each in content)
    demand(well, "columns of a site and a role", content)
    columns = tuple((site, role) for site, role in content)
    demand(len(set(columns)) == len(columns), "different columns", content)
    return columns


def _is_column(content: Any) -> bool:
    return isinstance(content, list) and len(content) == 2 and isinstance(content[0], str) and content[1] in ROLES
