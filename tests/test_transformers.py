"""Hugging Face models with tiny random weights: the loss and every gradient equal eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what importing transformers warns about is not ours
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import scoped_fn as sf
from tests.helpers import assert_same, assert_trains_like_eager, compiled, fresh

VOCABULARY, LENGTH = 48, 12

# transformers sets and resets a context variable of its own in each forward; Dynamo reports it as a changed object.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Expected .* to change nothing but its buffers.*_active_collector:UserWarning"
)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


# GPT-2 calls a logger in its forward, which Dynamo does not read.
BUILDERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (llama, "dynamo"),
    "gpt2": (gpt2, "trace"),
    "bert": (bert, "dynamo"),
}


class WithLoss(nn.Module):
    """The model's own loss and logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.model(input_ids=tokens, attention_mask=mask, labels=tokens)
        return out.loss, out.logits


def _build(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[torch.Tensor, ...], str]:
    build, capture = BUILDERS[name]
    torch.manual_seed(0)
    model = WithLoss(build().to(dtype).train())
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, -3:] = 0
    return model, (tokens, mask), capture


@pytest.mark.parametrize("name", BUILDERS)
def test_loss_and_every_gradient_equal_eager(name: str) -> None:
    model, inputs, capture = _build(name)
    assert_trains_like_eager(model, inputs, loss=lambda out: out[0], capture=capture, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", BUILDERS)
def test_loss_and_every_gradient_equal_eager_in_float64(name: str) -> None:
    model, inputs, capture = _build(name, torch.float64)
    assert_trains_like_eager(model, inputs, loss=lambda out: out[0], capture=capture, rtol=1e-9, atol=1e-12)


def test_loss_and_every_gradient_equal_eager_under_inductor() -> None:
    model, inputs, capture = _build("llama")
    assert_trains_like_eager(
        model, inputs, loss=lambda out: out[0], capture=capture, backend="inductor", rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("name", BUILDERS)
def test_value_and_grad_equals_autograd(name: str) -> None:
    model, (tokens, mask), capture = _build(name, torch.float64)
    loss = _only_loss(model)
    state, fn = compiled(loss, (tokens, mask), capture=capture)
    _, (value, grads) = sf.value_and_grad(fn)(state, fn.params, tokens, mask)
    expected = loss(tokens, mask)
    expected.backward()
    assert_same(value, expected.detach(), rtol=1e-10, atol=1e-12)
    theirs = {
        name: one.grad if one.grad is not None else torch.zeros_like(one) for name, one in loss.named_parameters()
    }
    assert_same(grads, theirs, rtol=1e-9, atol=1e-12)


def _only_loss(model: nn.Module) -> nn.Module:
    class OnlyLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            loss, _ = self.inner(tokens, mask)
            return loss

    return OnlyLoss()


def test_the_models_own_output_class_comes_back() -> None:
    torch.manual_seed(0)
    model = llama().train()
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    state, fn = compiled(model, (tokens,), {"labels": tokens})
    _, out = fn(state, fn.params, tokens, labels=tokens)
    expected = model(tokens, labels=tokens)
    assert type(out) is type(expected)
    assert_same(out.loss.detach(), expected.loss.detach(), rtol=1e-5, atol=1e-6)
    assert_same(out.logits.detach(), expected.logits.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BUILDERS)
def test_inference_in_evaluation_mode_equals_eager(name: str) -> None:
    model, inputs, capture = _build(name)
    model.eval()
    with torch.no_grad():
        state, fn = compiled(model, inputs, capture=capture)
        _, out = fn(state, fn.params, *inputs)
        assert_same(out, model(*inputs), rtol=1e-4, atol=1e-5)


def test_tied_head_of_gpt2_is_one_parameter() -> None:
    model, inputs, capture = _build("gpt2")
    state, fn = compiled(model, inputs, capture=capture)
    assert fn.aliases == {"model.lm_head.weight": "model.transformer.wte.weight"}
    params = fresh(fn.params)
    fn(state, params, *inputs)[1][0].backward()
    assert all(one.grad is not None for one in params.values())
