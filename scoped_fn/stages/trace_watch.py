"""What a plain trace would lose in silence, found by one run of the model on tensors without data."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from scoped_fn._autograd_graph import custom_nodes
from scoped_fn._errors import CaptureError, RandomOpError
from scoped_fn._torch.nodes import has_every_rule
from scoped_fn._torch.tracing import top_saved_tensors_hooks


def refuse_hidden_rules(flat: Callable[..., list[torch.Tensor]], fakes: list[torch.Tensor]) -> bool:
    """Returns whether the model applies custom autograd.Functions that have rules for every transform.

    No graph holds these rules, but running the model's code again keeps them.

    Args:
        flat: The model as a function of tensors.
        fakes: Fake tensors to run it on.

    Raises:
        CaptureError: There are checkpoint regions, hooks, other custom Functions or shapes that depend on values.
    """
    copies = [fake.detach().clone().requires_grad_(fake.requires_grad) for fake in fakes]
    with _Watch(), python_draws_refused():
        outputs = flat(*copies)
    nodes = custom_nodes(output for output in outputs if isinstance(output, torch.Tensor))
    for node in nodes:
        if not has_every_rule(node):
            raise CaptureError(
                _lost(f"custom autograd.Functions such as {type(node).__name__.removesuffix('Backward')}")
            )
    return bool(nodes)


def user_place(stack: Iterable[traceback.FrameSummary]) -> str:
    """Returns ' at file:line: `code`' of the innermost frame that is neither torch's nor ours, or ''."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [frame for frame in stack if not frame.filename.startswith(ours)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`" if frames else ""


@contextmanager
def python_draws_refused() -> Iterator[None]:
    """Raises if Python's or NumPy's generator moves: the number would be a constant of the graph. Puts them back."""
    numpy = sys.modules.get("numpy")
    before = random.getstate()
    numpy_before = numpy.random.get_state(legacy=False) if numpy else None
    try:
        yield
        moved = random.getstate() != before
        moved = moved or (numpy is not None and repr(numpy.random.get_state(legacy=False)) != repr(numpy_before))
    finally:
        random.setstate(before)
        if numpy:
            numpy.random.set_state(numpy_before)
    if moved:
        raise RandomOpError(
            "Expected a model that draws random numbers with torch alone for capture='trace', got a number drawn by "
            "Python's or NumPy's generator, which would be a constant. Draw it with torch, or pass it as an argument."
        )


class _Watch(TorchFunctionMode):
    """Looks at each operation of the model."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.register_hook:
            raise CaptureError(_lost("tensor hooks"))
        if top_saved_tensors_hooks(False) is not None:
            raise CaptureError(_lost("checkpoint regions and saved-tensor hooks"))
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in result.shape):
            raise CaptureError(
                f"Expected shapes that do not depend on tensor values, got one{user_place(traceback.extract_stack())}. "
                "Use torch.where, which keeps the shape."
            )
        return result


def _lost(what: str) -> str:
    return (
        f"Expected a model without {what} for capture='trace', which would lose them, got "
        f"one{user_place(traceback.extract_stack())}. Compile with capture='dynamo'."
    )
