"""`QuantizedParams`: parameters whose weights are quantized already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, eq=False)
class QuantizedParams(Mapping[str, torch.Tensor]):
    """What `quantize_weights` gives: a mapping of the parameters, by name, that carries their FP8 weights along.

    Attributes:
        params: Name -> parameter; gradients belong to these.
        codes: Site -> data and scale_inv of the rows of its weight, then of its columns where they are not views.
        rules: Site -> how it was quantized.
    """

    params: Mapping[str, torch.Tensor]
    codes: Mapping[str, tuple[torch.Tensor, ...]]
    rules: Mapping[str, str]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    def __repr__(self) -> str:
        return f"QuantizedParams({len(self.params)} parameters, quantized: {', '.join(self.codes) or 'none'})"

    @property
    def key(self) -> tuple[tuple[str, int, str], ...]:
        """What code depends on: the sites, how many tensors each weight is, and how it was quantized."""
        return tuple((site, len(codes), self.rules[site]) for site, codes in self.codes.items())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All codes, in the order of `key`."""
        return [tensor for codes in self.codes.values() for tensor in codes]

    def with_params(self, params: Mapping[str, torch.Tensor]) -> QuantizedParams:
        """Returns these codes with other tensors for the parameters, such as ones that a transform follows."""
        return replace(self, params=params)
