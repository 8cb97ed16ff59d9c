"""Modules of many kinds train like eager: parametrized, hooked, with unusual places for parameters and methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import scoped_fn as sf
from tests.helpers import assert_same, assert_trains_like_eager, compiled


class Lists(nn.Module):
    """Parameters in lists and dictionaries, a submodule in a plain list, a bound method as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.randn(3) for _ in range(2)])
        self.named = nn.ParameterDict({"a": torch.randn(3)})
        self.linear = nn.Linear(3, 3)
        self.plain = [self.linear]
        self.method = functools.partial(self._activate, factor=2)

    def _activate(self, x: torch.Tensor, factor: int) -> torch.Tensor:
        return (x * factor + self.linear.bias).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method(self.plain[0](x * self.several[0])) + self.several[1] * self.named["a"]


class PartlyFrozen(nn.Module):
    """A batch norm that stays in evaluation mode while the model trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


class AnyArguments(nn.Module):
    """Takes any number of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        return sum(self.linear(one) for one in (*inputs, *named.values()))


class InPlaceInside(nn.Module):
    """Writes to values of its own, none of them an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y[0] = 0
        y.mul_(2)
        y[:, 1].add_(1)
        return y


class Absent(nn.Module):
    """A parameter and a buffer that are None, and a weight that is returned as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_parameter("bias", None)
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> Any:
        return self.weight, x * self.weight, self.bias, self.mask


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    return model


ROWS = (torch.arange(12.0).view(4, 3) / 7,)
SEQUENCE = torch.arange(40.0).view(2, 5, 4).sin()
IMAGE = (torch.arange(72.0).view(1, 2, 6, 6).cos(),)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), ROWS),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), ROWS),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), ROWS),
    "hooks": (hooked, ROWS),
    "lists": (Lists, ROWS),
    "partly frozen": (PartlyFrozen, ROWS),
    "any arguments": (AnyArguments, (*ROWS, *ROWS)),
    "in place inside": (InPlaceInside, ROWS),
    "absent": (Absent, ROWS),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (SEQUENCE, SEQUENCE, SEQUENCE)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (SEQUENCE,)),
    "encoder layer, evaluation": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).eval(),
        (SEQUENCE,),
    ),
    "embedding": (lambda: nn.Embedding(5, 3, padding_idx=0), (torch.tensor([0, 1, 1, 4]),)),
    "embedding bag": (lambda: nn.EmbeddingBag(5, 3), (torch.tensor([0, 1, 1, 2]), torch.tensor([0, 2]))),
    "group norm": (lambda: nn.GroupNorm(1, 3), ROWS),
    "pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 2, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.ConvTranspose2d(2, 3, 2)
        ),
        IMAGE,
    ),
    "instance norm": (lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True), IMAGE),
}


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize("name", MODELS)
def test_a_module_trains_like_eager(name: str, capture: str) -> None:
    build, inputs = MODELS[name]
    assert_trains_like_eager(build(), inputs, capture=capture, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["weight norm", "pooling", "partly frozen", "encoder layer", "instance norm"])
def test_a_module_trains_like_eager_under_inductor(name: str) -> None:
    build, inputs = MODELS[name]
    assert_trains_like_eager(build(), inputs, backend="inductor", rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{"capture": "dynamo"}, {"capture": "trace"}, {"backend": "inductor"}], ids=str)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN], ids=lambda kind: kind.__name__)
def test_a_recurrent_module_trains_like_eager_or_is_refused(kind: type[nn.Module], options: dict[str, str]) -> None:
    inputs = (torch.arange(30.0).view(5, 2, 3).sin(),)
    try:
        assert_trains_like_eager(kind(3, 4), inputs, rtol=1e-4, atol=1e-5, **options)
    except sf.CaptureError as error:
        assert f"Expected {kind.__name__}" in str(error)


def test_a_recurrent_module_predicts_like_eager() -> None:
    model, sequence = nn.LSTM(3, 4), torch.arange(30.0).view(5, 2, 3).sin()
    with torch.no_grad():
        state, fn = compiled(model, (sequence,))
        assert_same(fn(state, fn.params, sequence)[1], model(sequence), rtol=1e-5, atol=1e-6)
