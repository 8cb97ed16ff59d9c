"""Torch's settings: which there are, and values that hold for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from scoped_fn._torch.dynamo import CAPTURE_SETTINGS

MODULES = (
    ("torch._inductor.config.", inductor_config),
    ("torch._functorch.config.", functorch_config),
    ("torch._dynamo.config.", dynamo_config),
)
PREFIXES = tuple(prefix for prefix, _ in MODULES)
# What every compile sets itself, so that another value would be lost.
OURS = frozenset(
    {"torch._inductor.config.fallback_random", "torch._functorch.config.backward_pass_autocast"}
    | {f"torch._dynamo.config.{name}" for name in CAPTURE_SETTINGS}
)


def setting_value(key: str) -> Any:
    """Returns the present value of a setting; `AttributeError` if there is no such setting."""
    module, name = _place(key)
    values = _values(module)
    if name not in values:
        raise AttributeError(key)
    return values[name]


@contextmanager
def patched(overrides: Mapping[str, Any]) -> Iterator[None]:
    """Makes settings hold in this thread until the block ends, however it ends."""
    with ExitStack() as stack:
        for prefix, module in MODULES:
            own = {key.removeprefix(prefix): value for key, value in overrides.items() if key.startswith(prefix)}
            if own:
                stack.enter_context(module.patch(own))
        yield


def setting_names() -> list[str]:
    """Returns the full paths of all settings."""
    return [prefix + name for prefix, module in MODULES for name in _values(module)]


def _values(module: Any) -> dict[str, Any]:
    return module.get_config_copy()  # type: ignore[no-any-return]


def _place(key: str) -> tuple[ModuleType | Any, str]:
    for prefix, module in MODULES:
        if key.startswith(prefix):
            return module, key.removeprefix(prefix)
    raise AttributeError(key)
