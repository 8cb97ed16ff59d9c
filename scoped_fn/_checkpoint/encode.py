"""A value as JSON and tensors by name."""

from __future__ import annotations

from typing import Any

import torch

from scoped_fn._checkpoint.dtypes import STORED, name_of, stored_form
from scoped_fn._checkpoint.memory import is_whole
from scoped_fn._checkpoint.plain import Document, container_document, described, scalar_document
from scoped_fn._checkpoint.state_document import state_document
from scoped_fn._checkpoint.unfit import Unfit
from scoped_fn._specs import laid_out
from scoped_fn._torch.tensors import PLAIN_TYPES
from scoped_fn._torch.wrapped import is_wrapped
from scoped_fn.state import CompilerState

METADATA = "__metadata__"
TOP = "value"


def encode(value: Any) -> tuple[Document, dict[str, torch.Tensor]]:
    """Returns a value as JSON and the tensors that it names, in the forms that are stored.

    Raises:
        Unfit: There is something that a file cannot hold.
    """
    encoder = _Encoder()
    return encoder.document(value, "", 0), encoder.tensors


class _Encoder:
    """Gathers the tensors of one value."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def document(self, value: Any, path: str, depth: int) -> Document:
        if isinstance(value, torch.Tensor):
            return self.add(path or TOP, value)
        if type(value) is CompilerState:
            return {"state": state_document(value, path, self.add)}
        document = container_document(value, path, depth, self.document)
        return scalar_document(value, path) if document is NotImplemented else document

    def add(self, path: str, tensor: torch.Tensor) -> Document:
        _check_tensor(tensor, path)
        stored, name = stored_form(tensor), self._free_name(path)
        if stored.dtype not in STORED:
            what = f"a tensor of a dtype that can be saved at {path}"
            raise Unfit(what, name_of(tensor.dtype), "Convert it first.")
        self.tensors[name] = stored
        document: dict[str, Any] = {"tensor": name}
        if stored.dtype != tensor.dtype:
            document["dtype"] = name_of(tensor.dtype)
        # Products of other memory layouts are rounded differently: a run goes on bit for bit only in the same one.
        if not tensor.is_contiguous():
            document["stride"] = list(laid_out(tensor).stride)
        if tensor.device.type != "cpu":
            document["device"] = str(tensor.device)
        return document

    def _free_name(self, path: str) -> str:
        """Returns the path as a name, with a number where dots in keys make two paths alike."""
        # Half of a surrogate pair is no text that other readers of the format take.
        path = path.encode("utf-8", "backslashreplace").decode("utf-8")
        name, count = path, 2
        while name in self.tensors or name == METADATA:
            name, count = f"{path}#{count}", count + 1
        return name


def _check_tensor(tensor: Any, path: str) -> None:
    if type(tensor) not in PLAIN_TYPES:
        raise Unfit(f"a plain tensor at {path}", described(tensor), "Convert it first.")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        kinds = {"on the meta device": tensor.is_meta, "that is nested": tensor.is_nested}
        kind = next((text for text, found in kinds.items() if found), f"of {tensor.dtype} and {tensor.layout}")
        raise Unfit(f"a tensor with its own values in memory at {path}", f"one {kind}", "Convert it first.")
    if is_wrapped(tensor):
        got = "one inside a torch.func transform"
        raise Unfit(f"a tensor with its own values in memory at {path}", got, "Save what the transform returns.")
    if not is_whole(tensor):
        raise Unfit(f"a tensor with its own values in memory at {path}", "one whose memory was freed", "Fill it first.")
