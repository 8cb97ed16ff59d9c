"""A small byte-level GPT: the model that ``scoped-fn train`` trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

HEAD_WIDTH = 32


@dataclass(frozen=True)
class GPTConfig:
    """The size of a `GPT`.

    Attributes:
        layers: Number of transformer blocks.
        width: Width C of the residual stream; a multiple of 32, the width of one attention head.
        context: Greatest number of tokens T the model sees at once.
        vocabulary: Number of different tokens V; 256 for bytes.
        dropout: Probability with which an element of what attention and perceptron add to the residual stream is
            dropped in training; below 1.
    """

    layers: int = 4
    width: int = 128
    context: int = 128
    vocabulary: int = 256
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention over (B, T, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns each position's mix of the positions up to it, (B, T, C)."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, HEAD_WIDTH)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class Block(nn.Module):
    """One transformer block: attention, then a two-layer perceptron, each on a normalised residual stream."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        # One that drops nothing would still be an operation in the graph.
        self.attention_dropout, self.dropout = (nn.Dropout(dropout) if dropout else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the residual stream after this block, (B, T, C)."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        hidden = functional.gelu(self.expand(self.perceptron_norm(x)))
        result: Tensor = x + self.dropout(self.project(hidden))
        return result


class GPT(nn.Module):
    """A decoder-only transformer whose output head shares the weight of its token embedding.

    Args:
        config: The size of the model.
        seed: Seeds the weights. The process's own random generator is left as it was.

    Example:
        >>> model = GPT(GPTConfig(layers=1, width=32, context=8), seed=0)
        >>> tokens = torch.zeros(2, 8, dtype=torch.int64)
        >>> model(tokens, tokens).shape
        torch.Size([])
        >>> model(tokens).shape
        torch.Size([2, 8, 256])
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # nn modules draw their first weights from the global generator
            self.token_embedding = nn.Embedding(config.vocabulary, config.width)
            self.position_embedding = nn.Embedding(config.context, config.width)
            self.blocks = nn.ModuleList(Block(config.width, config.dropout) for _ in range(config.layers))
            self.final_norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialize(config, torch.Generator().manual_seed(seed))

    def _initialize(self, config: GPTConfig, generator: torch.Generator) -> None:
        """Draws every matrix anew; those that write to the residual stream are smaller the more blocks add up."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0)
                continue
            writes_residual = name.endswith("project.weight")
            deviation = 0.02 / (2 * config.layers) ** 0.5 if writes_residual else 0.02
            nn.init.normal_(parameter, std=deviation, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns the mean loss in nats a token, or the logits where no targets are given.

        Args:
            tokens: int64 (B, T), T at most the context.
            targets: int64 (B, T), the token that follows each of `tokens`.

        Returns:
            A scalar loss, or logits (B, T, V).
        """
        # A product, not a look-up: the gradient of a look-up is added up in the order that threads come by, and would
        # differ in the last bits from run to run.
        chosen = functional.one_hot(tokens, self.token_embedding.num_embeddings).to(self.token_embedding.weight.dtype)
        x = chosen @ self.token_embedding.weight + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
