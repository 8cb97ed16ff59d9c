"""A function of somebody else, compiled by plain `torch.compile`: whatever we do, it is never compiled again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

AUTOGRAD_FUNCTION = torch.autograd.Function


def somebody_elses(x: torch.Tensor) -> torch.Tensor:
    """What is compiled."""
    return F.linear(x.sin(), x)


class Bystander:
    """The compiled function, and how often it was compiled."""

    def __init__(self) -> None:
        self.counter = CompileCounter()
        self.threads = torch.get_num_threads()
        self.x = torch.ones(2, 2, requires_grad=True)
        self.compiled = torch.compile(somebody_elses, backend=self.counter, fullgraph=True)
        self.call()

    def call(self) -> int:
        """Calls it under fixed settings; returns how often that compiled it."""
        before = self.counter.frame_count
        with self.fixed_settings():
            self.compiled(self.x)
        return int(self.counter.frame_count - before)

    @contextlib.contextmanager
    def fixed_settings(self) -> Iterator[None]:
        """The settings that Dynamo guards on, whatever a test left behind: that is not what is looked at here."""
        dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
        with torch.inference_mode(False), torch.enable_grad():
            torch.set_default_dtype(torch.float32)
            if threads != self.threads:
                torch.set_num_threads(self.threads)
            try:
                yield
            finally:
                torch.set_default_dtype(dtype)
                if threads != self.threads:
                    torch.set_num_threads(threads)

    def complaint(self) -> str:
        """What is wrong with the process as somebody else sees it; empty where nothing is."""
        if torch.autograd.Function is not AUTOGRAD_FUNCTION:
            return "torch.autograd.Function is another class"
        compiled = self.call()
        return f"a bystander's torch.compile'd function was compiled again, {compiled} times" if compiled else ""
