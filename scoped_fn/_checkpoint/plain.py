"""Plain data as JSON and back, exactly: numbers, strings, bytes, dtypes, devices and containers of them."""

from __future__ import annotations

import base64
import binascii
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from scoped_fn._checkpoint.dtypes import dtype_of, name_of
from scoped_fn._checkpoint.unfit import Unfit, demand, refusal

Document = Any
MAX_DEPTH = 64
# Python itself refuses to write or read much longer ones as decimal digits.
MAX_INTEGER_BITS = 8192
KINDS = "tensors, states, numbers, strings, bytes, None, dtypes, devices, and lists, tuples and dicts of them"


def scalar_document(value: Any, path: str) -> Document:
    """Returns a value without parts as JSON; raises `Unfit` for any other kind of object."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        _check_integer(value)
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is complex:
        return {"complex": [scalar_document(part, path) for part in (value.real, value.imag)]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if kind is torch.dtype:
        return {"dtype": name_of(value)}
    if kind is torch.device:
        return {"device": str(value)}
    raise Unfit(KINDS, f"{described(value)} at {path or 'the top'}")


def described(value: Any) -> str:
    """Returns what kind of object something is, for a message."""
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def container_document(value: Any, path: str, depth: int, inner: Callable[[Any, str, int], Document]) -> Document:
    """Returns a list, tuple or dict as JSON, or `NotImplemented` for anything else.

    Args:
        value: The value.
        path: Where it is, for messages.
        depth: How many containers it is in.
        inner: Gives the document of a part, from the part, its path and its depth.
    """
    kind = type(value)
    if kind not in (list, tuple, dict, OrderedDict):
        return NotImplemented
    if depth >= MAX_DEPTH:
        raise refusal(f"containers in at most {MAX_DEPTH} others", f"a deeper one at {path[:60]}...")
    if kind in (list, tuple):
        parts = [inner(part, joined(path, index), depth + 1) for index, part in enumerate(value)]
        return parts if kind is list else {"tuple": parts}
    pairs = [
        [scalar_document(key, f"{path or 'the top'} as a key"), inner(part, joined(path, key), depth + 1)]
        for key, part in value.items()
    ]
    return {"dict" if kind is dict else "ordered_dict": pairs}


def joined(path: str, part: Any) -> str:
    """Returns the path of a part of what is at a path."""
    return f"{path}.{part}" if path else str(part)


def plain_document(value: Any, path: str, depth: int = 0) -> Document:
    """Returns plain data as JSON; tensors and states are refused."""
    document = container_document(value, path, depth, plain_document)
    return scalar_document(value, path) if document is NotImplemented else document


def plain_value(document: Document) -> Any:
    """Returns the plain data that JSON stands for; raises `Unfit` if there is none."""
    tag, content = tag_of(document)
    return value_of(tag, content, plain_value)


def tag_of(document: Document) -> tuple[str, Any]:
    """Returns the kind that a document names and what it says of it: `{"tuple": [...]}` is of kind "tuple"."""
    if isinstance(document, list):
        return "list", document
    if not isinstance(document, dict):
        return "", document
    demand(len(document) == 1, "one kind of value", list(document))
    tag, content = next(iter(document.items()))
    demand(tag != "", "a kind of value", tag)  # what has no tag is no dict
    return tag, content


def value_of(tag: str, content: Any, inner: Callable[[Document], Any]) -> Any:
    """Returns the value of a kind; `inner` gives that of a part."""
    if tag == "":
        if type(content) is int:
            _check_integer(content)
        return content
    if tag in ("list", "tuple"):
        demand(isinstance(content, list), f"the parts of a {tag}", content)
        parts = [inner(part) for part in content]
        return parts if tag == "list" else tuple(parts)
    if tag in ("dict", "ordered_dict"):
        return _dict_of(tag, content, inner)
    makers: dict[str, Callable[[Any], Any]] = {
        "float": _float_of,
        "complex": _complex_of,
        "bytes": _bytes_of,
    }
    makers |= {"dtype": dtype_of, "device": device_of}
    if tag not in makers:
        raise refusal("a kind of value that this version knows", tag)
    return makers[tag](content)


def pairs_of(content: Any, what: str) -> list[tuple[Any, Any]]:
    """Returns the pairs of a list of pairs."""
    well = isinstance(content, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in content)
    demand(well, f"pairs of {what}", content)
    return [(key, value) for key, value in content]


def _dict_of(tag: str, content: Any, inner: Callable[[Document], Any]) -> Any:
    pairs = [(_key_of(key), inner(value)) for key, value in pairs_of(content, f"a {tag}")]
    made = dict(pairs) if tag == "dict" else OrderedDict(pairs)
    demand(len(made) == len(pairs), f"different keys of a {tag}", [key for key, _ in pairs])
    return made


def _key_of(document: Document) -> Any:
    tag, content = tag_of(document)
    demand(tag not in ("list", "tuple", "dict", "ordered_dict"), "a key without parts", document)
    return value_of(tag, content, plain_value)


def _check_integer(value: int) -> None:
    if value.bit_length() > MAX_INTEGER_BITS:
        raise Unfit(f"an integer of at most {MAX_INTEGER_BITS} bits", f"one of {value.bit_length()}")


def _float_of(content: Any) -> float:
    demand(content in ("nan", "inf", "-inf"), "nan, inf or -inf", content)
    return float(content)


def _complex_of(content: Any) -> complex:
    parts = [plain_value(part) for part in content] if isinstance(content, list) else []
    demand(len(parts) == 2 and all(type(part) is float for part in parts), "two floats", content)
    return complex(*parts)


def _bytes_of(content: Any) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise refusal("bytes in base64", content) from None


def device_of(content: Any) -> torch.device:
    """Returns the device of a name; raises `Unfit` if there is none."""
    demand(isinstance(content, str), "the name of a device", content)
    try:
        device = torch.device(content)
    except (RuntimeError, TypeError, ValueError):
        raise refusal("the name of a device", content) from None
    demand(str(device) == content, "the name of a device", content)  # torch wraps a large index around
    return device
