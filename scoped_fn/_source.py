"""`Source`: what is compiled, frozen as it was when `compile` saw it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from scoped_fn._errors import SpecError
from scoped_fn._frozen_module import replace_tensors


@dataclass(frozen=True, eq=False)
class Source:
    """A model or function, its tensors by name, and how to call it.

    Attributes:
        call: The function, or a copy of the module that shares its tensors: the user may change mode, submodules,
            hooks or attributes of the original and later variants still see the model that was compiled.
        name: The class or function's name.
        params: Canonical name -> parameter; a tied parameter appears once, by its first name.
        aliases: Further name -> canonical name.
        buffers: Canonical name -> the module's own buffer.
        buffer_places: For each buffer, the submodule of `call` and the attribute that holds it.
        training: The module's mode; None for a function.
        originals: `id` of each of the user's own parameters and buffers -> name.
        unset_buffers: Submodules of `call` and their buffers that are None.
    """

    call: Callable[..., Any]
    name: str
    params: dict[str, nn.Parameter]
    aliases: dict[str, str]
    buffers: dict[str, torch.Tensor]
    buffer_places: tuple[tuple[nn.Module, str], ...]
    training: bool | None
    originals: dict[int, str]
    unset_buffers: tuple[tuple[nn.Module, str], ...]

    @property
    def is_module(self) -> bool:
        """Whether calls take the parameters as their first argument."""
        return isinstance(self.call, nn.Module)


def make_source(model_or_fn: Any, name: str | None = None) -> Source:
    """Returns the source of a module or a function.

    Raises:
        SpecError: It is neither.
    """
    if not isinstance(model_or_fn, nn.Module):
        if not callable(model_or_fn):
            raise SpecError(
                f"Expected a torch.nn.Module or a function, got a {type(model_or_fn).__name__}. Pass the model."
            )
        own_name = getattr(model_or_fn, "__name__", type(model_or_fn).__name__)
        return Source(model_or_fn, name or own_name, {}, {}, {}, (), None, {}, ())
    params, aliases = _by_identity(model_or_fn.named_parameters(remove_duplicate=False))
    parameters = {id(tensor) for tensor in params.values()}
    named_buffers = model_or_fn.named_buffers(remove_duplicate=False)
    buffers, _ = _by_identity((n, b) for n, b in named_buffers if id(b) not in parameters)
    _refuse_lazy({**params, **buffers})
    frozen = replace_tensors(model_or_fn, {})
    own_name = type(model_or_fn).__name__
    return Source(
        call=frozen,
        name=name or own_name,
        params=params,
        aliases=aliases,
        buffers=buffers,
        buffer_places=buffer_places(frozen, buffers),
        training=model_or_fn.training,
        originals={id(tensor): key for key, tensor in {**buffers, **params}.items()},
        unset_buffers=unset_buffers(frozen),
    )


def unset_buffers(module: nn.Module) -> tuple[tuple[nn.Module, str], ...]:
    """Returns the submodules and names of buffers that are None."""
    tables = ((part, part.__dict__["_buffers"]) for part in module.modules())
    return tuple((part, name) for part, table in tables for name, value in table.items() if value is None)


def _refuse_lazy(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise SpecError(
                f"Expected an initialized model, got lazy {name!r}. Run the model once before compiling it."
            )


def buffer_places(module: nn.Module, names: Iterable[str]) -> tuple[tuple[nn.Module, str], ...]:
    """Returns, for each buffer, the submodule and attribute that holds it."""
    split = [name.rpartition(".") for name in names]
    return tuple((module.get_submodule(path), leaf) for path, _, leaf in split)


def _by_identity(named: Any) -> tuple[dict[str, Any], dict[str, str]]:
    first: dict[int, str] = {}
    canonical: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named:
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            canonical[name] = tensor
    return canonical, aliases
