"""Marks that the test files of this folder share."""

from __future__ import annotations

import pytest

QUIET = [
    pytest.mark.usefixtures("one_thread"),
    # torch.func's forward mode scripts its own helpers where it is first used.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    # torch.func.linearize builds its graph in two steps, and warns about the first.
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
    # Eager's vmap of the fused attention goes sample by sample.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
