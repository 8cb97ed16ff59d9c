"""`detect`: facts about this machine as constants of the state."""

from __future__ import annotations

import ctypes
from importlib import metadata
from typing import Any

import torch

from scoped_fn._state_check import check_state
from scoped_fn.state import CompilerState, set_constant


def detect(state: CompilerState) -> CompilerState:
    """Returns the state with constants that say what this machine has, where it has none by that name yet.

    `torch.version`, `triton.version`, `cuda.version`, `cuda.capability` (major, minor) of the current device, and
    `cublaslt.version`; None for what is not there. Set one by hand to see what would be done elsewhere:
    `set_constant(state, "cuda.capability", (10, 0))`.

    Example:
        >>> import torch, scoped_fn as sf
        >>> sf.detect(sf.init_state()).constants["torch.version"] == torch.__version__
        True
    """
    check_state(state)
    cuda = torch.cuda.is_available()
    found: dict[str, Any] = {
        "torch.version": str(torch.__version__),
        "triton.version": installed_version("triton"),
        "cuda.version": torch.version.cuda if cuda else None,
        "cuda.capability": tuple(torch.cuda.get_device_capability()) if cuda else None,
        "cublaslt.version": _cublaslt_version() if cuda else None,
    }
    for name, value in found.items():
        if name not in state.constants:
            state = set_constant(state, name, value)
    return state


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cublaslt_version() -> int | None:
    """Returns what cublasLtGetVersion() says, such as 120803; the library is in the process once CUDA is in use."""
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return int(library.cublasLtGetVersion())
    except (OSError, AttributeError):
        return None
