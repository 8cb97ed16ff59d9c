"""Dropout between the layers of recurrent networks, against the same layers one by one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import scoped_fn as sf
from scoped_fn._random.rules import KeyedMode
from scoped_fn._random.words import words_of
from tests.helpers import assert_same, compiled

X = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(3))
KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "both ways": (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    "no bias": (nn.GRU, {"bias": False}),
}


def layers_of(model: nn.RNNBase) -> list[nn.RNNBase]:
    """The layers of a network as networks of one layer, with its weights."""
    made, ways = [], 2 if model.bidirectional else 1
    for i in range(model.num_layers):
        size = model.input_size if i == 0 else model.hidden_size * ways
        options = {"nonlinearity": model.nonlinearity} if isinstance(model, nn.RNN) else {}
        options |= {"bidirectional": model.bidirectional, "batch_first": model.batch_first, "bias": model.bias}
        layer = type(model)(size, model.hidden_size, **options)
        own = {name.replace("_l0", f"_l{i}"): name for name, _ in layer.named_parameters()}
        layer.load_state_dict({name: model.state_dict()[key] for key, name in own.items()})
        made.append(layer)
    return made


def by_layers(model: nn.RNNBase, x: Tensor, key: Tensor) -> tuple[Tensor, Any]:
    """What the network gives whose dropout after layer i draws with `fold_in(key, i)`."""
    ends = []
    for i, layer in enumerate(layers_of(model)):
        x, end = layer(x)
        ends.append(end)
        if i + 1 < model.num_layers:
            kept = sf.random.bernoulli(sf.fold_in(key, i), 1 - model.dropout, x.shape)
            x = torch.where(kept, x / (1 - model.dropout), 0.0)
    if isinstance(ends[0], tuple):
        return x, tuple(torch.cat(part) for part in zip(*ends, strict=True))
    return x, torch.cat(ends)


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize("name", KINDS)
def test_dropout_draws_between_the_layers(name: str, capture: str) -> None:
    torch.manual_seed(0)
    kind, options = KINDS[name]
    model = kind(4, 3, num_layers=3, dropout=0.4, **options)
    state, fn = compiled(model, (X,), capture=capture)
    after, out = fn(state, fn.params, X)
    expected = by_layers(model, X, sf.split(state.key)[1])
    assert_same(out, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(after.key, sf.split(state.key)[0])
    assert not torch.allclose(out[0], copy.deepcopy(model).eval()(X)[0])


def test_gradients_go_through_the_same_masks() -> None:
    torch.manual_seed(0)
    model = nn.GRU(4, 3, num_layers=2, dropout=0.4)
    state, fn = compiled(model, (X,))
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    fn(state, fn.params, x)[1][0].square().sum().backward()
    by_layers(model, other, sf.split(state.key)[1])[0].square().sum().backward()
    assert_same(x.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_a_packed_sequence_has_dropout_too() -> None:
    torch.manual_seed(0)
    model, key = nn.LSTM(4, 3, num_layers=2, dropout=0.5), sf.random.key(5)
    packed = pack_padded_sequence(X, [5, 3])
    with KeyedMode(lambda i: words_of(key)) as mode:
        out = model(packed)[0].data
    first, second = layers_of(model)
    middle = first(packed)[0]
    kept = sf.random.bernoulli(sf.fold_in(key, 0), 0.5, middle.data.shape)
    dropped = PackedSequence(torch.where(kept, middle.data * 2, 0.0), packed.batch_sizes)
    assert mode.count == 1
    assert_same(out, second(dropped)[0].data, rtol=1e-5, atol=1e-6)


def test_one_layer_draws_nothing() -> None:
    model = nn.RNN(4, 3, num_layers=1)
    model.dropout = 0.5
    state, fn = compiled(model, (X,))
    assert fn(state, fn.params, X)[0].key is state.key
