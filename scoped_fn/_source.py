"""`Source`: what is compiled, frozen as it was when `compile` saw it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scoped_fn._errors import SpecError


@dataclass(frozen=True, eq=False)
class Source:
    """A model or function, its tensors by name, and how to call it.

    Attributes:
        call: The function, or a structural copy of the module that shares its tensors: the user may change mode,
            submodules or buffers of the original and later variants still see the model that was compiled.
        name: The class or function's name.
        params: Canonical name -> parameter; a tied parameter appears once, by its first name.
        aliases: Further name -> canonical name.
        buffers: Canonical name -> the module's own buffer.
        buffer_places: For each buffer, the submodule of `call` and the attribute that holds it.
        training: The module's mode; None for a function.
    """

    call: Callable[..., Any]
    name: str
    params: dict[str, nn.Parameter]
    aliases: dict[str, str]
    buffers: dict[str, torch.Tensor]
    buffer_places: tuple[tuple[nn.Module, str], ...]
    training: bool | None

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
        return Source(model_or_fn, name or own_name, {}, {}, {}, (), None)
    params, aliases = _by_identity(model_or_fn.named_parameters(remove_duplicate=False))
    buffers, _ = _by_identity(model_or_fn.named_buffers(remove_duplicate=False))
    frozen = replace_tensors(model_or_fn, {})
    own_name = type(model_or_fn).__name__
    return Source(
        frozen, name or own_name, params, aliases, buffers, buffer_places(frozen, buffers), model_or_fn.training
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


def replace_tensors(module: nn.Module, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
    """Returns a structural copy of a module: new module objects, shared tensors except where replaced.

    Args:
        module: The module; it is not touched.
        tensors: `id` of a parameter or buffer -> what takes its place, under every name it has.
    """
    return _replace(module, tensors, {})


def _replace(module: nn.Module, tensors: Mapping[int, torch.Tensor], done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    # Not copy.copy: a module may forbid pickling, on which copying rests.
    made: nn.Module = object.__new__(type(module))
    done[id(module)] = made
    fields, children = made.__dict__, module.__dict__["_modules"].items()
    for name, value in module.__dict__.items():
        fields[name] = _swap(value, tensors)
    fields["_modules"] = {name: child if child is None else _replace(child, tensors, done) for name, child in children}
    return made


def _swap(value: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """Replaces tensors in an attribute: recurrent layers, for one, also keep their parameters in a list."""
    if type(value) is dict:
        return {key: tensors.get(id(item), item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(tensors.get(id(item), item) for item in value)
    return tensors.get(id(value), value)
