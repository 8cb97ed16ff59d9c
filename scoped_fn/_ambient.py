"""`Ambient`: the torch settings of a thread that change what a model computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from scoped_fn._torch.tracing import is_any_autocast_enabled

DEVICES = ("cpu", "cuda", "xpu", "mps")


@dataclass(frozen=True)
class Ambient:
    """Settings that compiled code holds for.

    Attributes:
        dtype: The default dtype.
        grad: Grad mode, where it matters.
        autocast: Devices with autocast, and the dtype they cast to.
    """

    dtype: torch.dtype
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...] = ()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Makes autocast as it was, whatever it is now."""
        with ExitStack() as stack:
            for device, dtype in _autocast_now():
                if device not in dict(self.autocast):
                    stack.enter_context(torch.autocast(device, dtype, enabled=False))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
            yield


def ambient_settings(kind: object) -> Ambient:
    """Returns the settings of this thread, for a call of this kind."""
    grad = torch.is_grad_enabled() if kind == "inference" else True
    return Ambient(torch.get_default_dtype(), grad, _autocast_now() if is_any_autocast_enabled() else ())


def without_autocast() -> Ambient:
    """Returns settings under which autograd's backward runs."""
    return Ambient(torch.get_default_dtype(), True)


def _autocast_now() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((d, torch.get_autocast_dtype(d)) for d in DEVICES if torch.is_autocast_enabled(d))
