"""What TransformerEngine saves of a module, read as data: a pickle of which tensors and plain containers are taken.

Its pickle also holds the recipe, an object of a class of TransformerEngine. That class is not imported: whatever the
pickle names of it becomes an empty object. Any other name is refused, so that no function of a file's choice is called.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

TENSORS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
OF_RECIPES = "transformer_engine"


class Inert:
    """An object of a class of TransformerEngine, without anything in it."""

    def __new__(cls, *_: Any) -> Inert:
        """Takes any arguments and keeps none."""
        return object.__new__(cls)

    def __init__(self, *_: Any) -> None:
        """Takes any arguments and keeps none."""

    def __setstate__(self, state: Any) -> None:
        """Keeps nothing."""


def extra_state_tensors(value: Any, name: str) -> dict[str, torch.Tensor]:
    """Returns the four tensors of a module's extra state.

    Args:
        value: The extra state: a dict of the tensors, or what TransformerEngine makes of it: a tensor of bytes, or a
            `BytesIO`, with a pickle.
        name: Its name in the state_dict, for messages.

    Returns:
        `scale_fwd` (3 g) and `scale_bwd` (2 g), and `amax_history_fwd` (L, 3 g) and `amax_history_bwd` (L, 2 g), all
        float32, for g matmuls.

    Raises:
        CheckpointError: It holds something else.
    """
    content = value if isinstance(value, Mapping) else _unpickled(_bytes_of(value, name), name)
    missing = [each for each in TENSORS if not isinstance(content, Mapping) or each not in content]
    if missing:
        raise refusal(
            f"{name} with {', '.join(TENSORS)}", f"none of {missing[0]}", "Only delayed scaling has such a state."
        )
    found = {each: content[each] for each in TENSORS}
    _check_forms(found, name)
    return found


def refusal(expected: str, got: str, advice: str) -> Exception:
    """Returns the error about a checkpoint."""
    import scoped_fn as sf

    return sf.CheckpointError(f"Expected {expected}, got {got}. {advice}")


def _bytes_of(value: Any, name: str) -> bytes:
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1:
        if not value.numel():
            advice = "TransformerEngine saves nothing of a module that did not run in FP8; load one that did."
            raise refusal(f"FP8 scales in {name}", "an empty extra state", advice)
        return bytes(value.tolist())
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    advice = "Pass a state_dict of TransformerEngine."
    raise refusal(f"{name} as a dict of tensors or as bytes", f"a {type(value).__name__}", advice)


def _unpickled(content: bytes, name: str) -> Any:
    try:
        if content.startswith(b"PK"):  # of older versions: a file of torch.save
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        _check_places(content)
        return _TensorsOnly(io.BytesIO(content)).load()
    except Exception as error:  # unpickling raises about anything on bytes that are no pickle, or a forged one
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        advice = "Nothing in it was executed. Use a checkpoint that TransformerEngine made."
        raise refusal(f"a pickle of tensors and plain data in {name}", f"'{reason}'", advice) from error


def _check_places(content: bytes) -> None:
    """Raises if a pickle remembers something at a place beyond its own length: it would ask for as much memory."""
    for code, place, _ in pickletools.genops(content):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and place is not None and int(place) > len(content):
            raise pickle.UnpicklingError(f"place {place} in the memory of a pickle of {len(content)} bytes")


class _TensorsOnly(pickle.Unpickler):
    """Takes tensors, plain containers and `Inert` objects."""

    def find_class(self, module: str, name: str, /) -> Callable[..., Any]:
        known: dict[tuple[str, str], Callable[..., Any]] = {
            # New functions each time: a pickle may set attributes of what it names.
            ("torch", "_rebuild_tensor_v2"): lambda *given: _tensor_of(*given),
            ("torch", "_load_from_bytes"): lambda *given: _storage_of(*given),
            ("collections", "OrderedDict"): OrderedDict,
        }
        library = module.split(".")[0]
        if library == OF_RECIPES:
            return Inert
        if (library, name) not in known:
            raise pickle.UnpicklingError(f"{module}.{name}, which is neither a tensor nor plain data")
        return known[library, name]

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError("a reference to something outside")


def _storage_of(content: Any) -> Any:
    """Returns the memory that torch had put into a pickle of its own; nothing but tensors comes out of that."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _tensor_of(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    """Returns a tensor in a piece of memory; torch refuses one that is not within it."""
    whole = torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage)
    part = whole.as_strided(size, stride, offset)
    if part.numel() > whole.numel():
        raise pickle.UnpicklingError(f"a tensor of {part.numel()} elements in memory of {whole.numel()}")
    return part.clone()


def _check_forms(found: Mapping[str, Any], name: str) -> None:
    for each, value in found.items():
        dim = 1 if each.startswith("scale") else 2
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or value.dim() != dim:
            advice = "Convert it first."
            raise refusal(f"{each} in {name} as float32 of {dim} dimensions", _described(value), advice)
    shapes = {each: tuple(value.shape) for each, value in found.items()}
    length, matmuls = shapes["amax_history_fwd"][0], shapes["scale_fwd"][0] // 3
    forward, backward = (3 * matmuls,), (2 * matmuls,)
    wanted = dict(zip(TENSORS, (forward, (length, *forward), backward, (length, *backward)), strict=True))
    if shapes != wanted or not matmuls or not length:
        expected = f"three columns of the forward and two of the backward for each matmul in {name}"
        raise refusal(expected, f"{shapes}", "Use a checkpoint that TransformerEngine made.")


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
