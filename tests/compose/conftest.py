"""What holds for every test of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad


def take_levels_off() -> bool:
    """Takes off what transforms or dual levels are on; returns whether there were any."""
    levels = torch._C._functorch.get_dynamic_layer_stack_depth()
    found = levels > 0 or forward_ad._current_level >= 0 or eager_transforms.JVP_NESTING > 0
    if found:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)
        with contextlib.suppress(RuntimeError):  # none is on: it went with the transform
            torch._C._exit_dual_level(level=0)
        forward_ad._current_level, eager_transforms.JVP_NESTING = -1, 0
    return found


@pytest.fixture(autouse=True)
def _no_level_left() -> Iterator[None]:
    """No transform or dual level is on after a test; one that was left on must not fail other tests."""
    take_levels_off()
    yield
    assert not take_levels_off(), "a transform or dual level was left on"
