"""The older vmap of torch, beside that of `torch.func`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import _vmapmode_decrement_nesting, _vmapmode_increment_nesting
from torch._C._functorch import is_legacy_batchedtensor


class OlderVmap:
    """The vmap of `is_grads_batched` and gradcheck, which is no level of `torch.func`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.number = _vmapmode_increment_nesting() - 1
        _vmapmode_decrement_nesting()
        self.size = next(self.unwrap_batch(t)[0].shape[0] for t in tensors if is_legacy_batchedtensor(t))

    def batch(self) -> tuple[int, str]:
        """Returns the batch size, and that random ops are refused."""
        return self.size, "error"

    def unwrap_batch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Returns what is wrapped, with the batch as first dimension, and 0; None if it is not wrapped."""
        if not is_legacy_batchedtensor(tensor):
            return tensor, None
        return torch._remove_batch_dim(tensor, self.number, 1, 0), 0

    def add_batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor wrapped, whose first dimension is the batch."""
        return torch._add_batch_dim(tensor, 0, self.number)


def in_older_vmap(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether the older vmap acts on one of the tensors."""
    return any(map(is_legacy_batchedtensor, tensors))
